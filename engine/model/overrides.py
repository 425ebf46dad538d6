"""Overrides: what single adapters change outside the linears (embed_tokens, lm_head, norms, single tokens), for the
rows of their requests. Most batches have none, and pay nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from adapters.spec import MODULES
from engine.adapter_view import Extras, TablePart
from engine.batch import ForwardBatch, Segment
from engine.ops import Ops

INPUT_NORM, POST_NORM, Q_NORM, K_NORM, NORM = (
    MODULES.index(name) for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")
)


class Overrides:
    """Of one batch; false where there are none.

    Legend: T tokens, H hidden size, V vocabulary, N replaced rows, R rows of logits.
    """

    def __init__(self, batch: ForwardBatch, ops: Ops, eps: float, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._eps = eps
        self._parts: list[tuple[Segment, Extras]] = []
        self._bank = bank = batch.bank
        if bank is not None:
            found = ((segment, bank.extras(segment.slot)) for segment in batch.segments)
            self._parts = [(segment, extras) for segment, extras in found if extras is not None]

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def num_added(self) -> int:
        """Tokens that an adapter of the batch adds to the vocabulary, at most."""
        return max(extras.num_added for _, extras in self._parts)

    @property
    def in_layers(self) -> bool:
        """Whether an adapter changes something between the first layer and the last."""
        return any(module != NORM for _, extras in self._parts for _, module in extras.norms)

    def _batched(self, table: Literal["embedding", "head"]) -> list[Segment]:
        """Segments whose adapters have LoRA of a table, and no other change of it, where the ops take them at once."""
        if self._ops.table_lora is None:
            return []
        parts = ((segment, extras, getattr(extras, table)) for segment, extras in self._parts)
        return [s for s, extras, part in parts if part is not None and part.a is not None and not extras.num_added]

    def embed(self, x_TH: Tensor, tokens_T: Tensor) -> None:
        """Rows of the embedding, in place: g ∘ (x + B·A[token]), a whole other table, other rows of some tokens, or
        rows of new ones."""
        tables, batched = self._ops.table_lora, self._batched("embedding")
        if tables is not None and batched and self._bank is not None:
            tables.embed(x_TH, tokens_T, batched, self._bank)
        for segment, extras in self._parts:
            if extras.embedding is not None and segment not in batched:
                rows = slice(segment.start, segment.end)
                x_TH[rows] = self._embedded(x_TH[rows], tokens_T[rows], extras.embedding)

    def norm(self, y: Tensor, x: Tensor, layer: int, module: int) -> None:
        """y = rms_norm(x) with the adapters' own weights, in place; the last dimension is normalised."""
        for segment, extras in self._parts:
            weight = extras.norms.get((layer, module))
            if weight is not None:
                rows = slice(segment.start, segment.end)
                y[rows] = self._ops.rms_norm(x[rows], weight.to(y.dtype), self._eps)

    def last_norm(self, y_RH: Tensor, x_RH: Tensor, rows_R: Tensor, layer: int) -> None:
        """norm(), for the rows `rows_R` of the batch."""
        for segment, extras in self._parts:
            weight = extras.norms.get((layer, NORM))
            picked = _picked(rows_R, segment) if weight is not None else None
            if weight is not None and picked is not None:
                y_RH[picked] = self._ops.rms_norm(x_RH[picked], weight.to(y_RH.dtype), self._eps)

    def head(self, logits_RV: Tensor, normal_RH: Tensor, rows_R: Tensor) -> None:
        """Logits of the rows `rows_R` of the batch, in place; V has room for new tokens, −inf where a row has none."""
        num_own = logits_RV.shape[1] - self.num_added
        tables, batched = self._ops.table_lora, self._batched("head")
        if tables is not None and batched and self._bank is not None:
            tables.head(logits_RV, normal_RH, rows_R, batched, self._bank)
        for segment, extras in self._parts:
            is_own = extras.head is not None and segment not in batched
            picked = _picked(rows_R, segment) if is_own else None
            if extras.head is not None and picked is not None:
                width = num_own + extras.num_added
                logits_RV[picked, :width] = self._logits(logits_RV[picked, :width], normal_RH[picked], extras.head)

    def _embedded(self, x_TH: Tensor, tokens_T: Tensor, part: TablePart) -> Tensor:
        if part.weight_VH is not None:
            return part.weight_VH[tokens_T].to(x_TH.dtype)
        if part.added_NH is not None:
            place_T = tokens_T - self._vocab_size
            added_TH = part.added_NH[place_T.clamp(min=0)].to(x_TH.dtype)
            x_TH = torch.where((place_T >= 0).unsqueeze(1), added_TH, x_TH)
        if part.ids_N is not None and part.rows_NH is not None:
            place_T = torch.searchsorted(part.ids_N, tokens_T).clamp_(max=len(part.ids_N) - 1)
            is_own_T1 = (part.ids_N[place_T] == tokens_T).unsqueeze(1)
            return torch.where(is_own_T1, part.rows_NH[place_T].to(x_TH.dtype), x_TH)
        if part.a is None:
            return x_TH
        assert part.b is not None
        a_TR = part.a[tokens_T].to(x_TH.dtype)
        return _scaled(x_TH + self._ops.dense(a_TR, part.b), part)

    def _logits(self, logits_RV: Tensor, x_RH: Tensor, part: TablePart) -> Tensor:
        ops = self._ops
        if part.weight_VH is not None:
            return ops.dense(x_RH, part.weight_VH).float()
        if part.added_NH is not None:
            logits_RV[:, -len(part.added_NH) :] = ops.dense(x_RH, part.added_NH).float()
        if part.ids_N is not None and part.rows_NH is not None:
            return logits_RV.index_copy(1, part.ids_N, ops.dense(x_RH, part.rows_NH).float())
        if part.a is None:
            return logits_RV
        assert part.b is not None
        return _scaled(logits_RV + ops.dense(ops.dense(x_RH, part.a), part.b).float(), part)


def _scaled(y: Tensor, part: TablePart) -> Tensor:
    if part.gain is not None:
        y = (y * part.gain).to(y.dtype)
    return y if part.shift is None else (y + part.shift).to(y.dtype)


def _picked(rows_R: Tensor, segment: Segment) -> Tensor | None:
    """Which of these rows are the segment's."""
    picked = torch.nonzero((rows_R >= segment.start) & (rows_R < segment.end))[:, 0]
    return picked if len(picked) else None
