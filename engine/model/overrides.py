"""Overrides: what single adapters change outside the linears (embed_tokens, lm_head, norms, single tokens), for the
rows of their requests. Most batches have none, and pay nothing."""

from __future__ import annotations

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

    def __init__(self, batch: ForwardBatch, ops: Ops, eps: float) -> None:
        self._ops = ops
        self._eps = eps
        self._parts: list[tuple[Segment, Extras]] = []
        bank = batch.bank
        if bank is not None:
            found = ((segment, bank.extras(segment.slot)) for segment in batch.segments)
            self._parts = [(segment, extras) for segment, extras in found if extras is not None]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def embed(self, x_TH: Tensor, tokens_T: Tensor) -> None:
        """Rows of the embedding, in place: g ∘ (x + B·A[token]), a whole other table, or other rows of some tokens."""
        for segment, extras in self._parts:
            if extras.embedding is not None:
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
        """Logits of the rows `rows_R` of the batch, in place."""
        for segment, extras in self._parts:
            picked = _picked(rows_R, segment) if extras.head is not None else None
            if extras.head is not None and picked is not None:
                logits_RV[picked] = self._logits(logits_RV[picked], normal_RH[picked], extras.head)

    def _embedded(self, x_TH: Tensor, tokens_T: Tensor, part: TablePart) -> Tensor:
        if part.weight_VH is not None:
            return part.weight_VH[tokens_T].to(x_TH.dtype)
        if part.ids_N is not None and part.rows_NH is not None:
            place_T = torch.searchsorted(part.ids_N, tokens_T).clamp_(max=len(part.ids_N) - 1)
            is_own_T1 = (part.ids_N[place_T] == tokens_T).unsqueeze(1)
            return torch.where(is_own_T1, part.rows_NH[place_T].to(x_TH.dtype), x_TH)
        assert part.a is not None
        assert part.b is not None
        a_TR = part.a[tokens_T].to(x_TH.dtype)
        return _scaled(x_TH + self._ops.dense(a_TR, part.b), part)

    def _logits(self, logits_RV: Tensor, x_RH: Tensor, part: TablePart) -> Tensor:
        ops = self._ops
        if part.weight_VH is not None:
            return ops.dense(x_RH, part.weight_VH).float()
        if part.ids_N is not None and part.rows_NH is not None:
            return logits_RV.index_copy(1, part.ids_N, ops.dense(x_RH, part.rows_NH).float())
        assert part.a is not None
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
