"""CpuOps: the ops as a CPU likes them, in plain torch: what runs in fp32, and where nothing native can be built.
Weights laid out once, decode attention of all rows at once, activations and adapters in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import ForwardBatch, Ints
from engine.ops import LoraSlices, Moments
from engine.ops.reference import ReferenceOps
from engine.quantization import Quantization

TYPICAL_ROWS = 8
"""Rows that the layout of packed weights is chosen for."""

MIN_BUCKET = 8
"""Blocks up to which decode rows share one padded bucket; above it, a bucket holds rows within a factor of two."""


class CpuOps(ReferenceOps):
    """`dtype` is how weights and KV are kept. Everything else is fp32, which is at least as exact."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(torch.float32)
        self.weight_dtype = dtype
        self._has_onednn = has_onednn(dtype)

    def pack_linear(
        self, weight_OH: Tensor, quantization: Quantization | None = None, moments: Moments | None = None
    ) -> Tensor:
        """fp32 transposed to [H, O]; 16-bit as oneDNN blocks it, where it can."""
        assert quantization is None, "create_ops refuses it"
        if self.weight_dtype == torch.float32:
            return weight_OH.t().float().contiguous()
        weight_OH = weight_OH.contiguous()
        if self._has_onednn:
            weight_OH = torch.ops.mkldnn._reorder_linear_weight(weight_OH, TYPICAL_ROWS)
        return weight_OH

    def linear(self, x_TH: Tensor, packed: Tensor, bias_O: Tensor | None = None) -> Tensor:
        if self.weight_dtype == torch.float32:
            return x_TH @ packed if bias_O is None else torch.addmm(bias_O, x_TH, packed)
        x_TH = x_TH.to(packed.dtype)
        y_TO: Tensor
        if self._has_onednn:
            y_TO = torch.ops.mkldnn._linear_pointwise(x_TH, packed, None, "none", [], "")
        else:
            y_TO = F.linear(x_TH, packed)
        y_TO = y_TO.float()
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def lora(self, y_TO: Tensor, x_TH: Tensor, plan: AttentionPlan, layer: int, slices: LoraSlices) -> None:
        super().lora(y_TO, x_TH, plan.batch, layer, slices)

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual_TH.add_(x_TH)
        return self.rms_norm(residual_TH, weight_H, eps), residual_TH

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate, up = gate_up_T2I.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        return AttentionPlan(batch, self.weight_dtype)

    def attention(self, q_TND: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, window: int | None) -> Tensor:
        """One product for all decode rows of about equal context, one per chunk of a prompt."""
        num_kv_heads, head_dim = cache.shape[2:]
        q_TND = q_TND.to(cache.dtype)
        blocks = cache.view(2, -1, plan.block_size * num_kv_heads * head_dim)
        out_TND = torch.empty_like(q_TND)
        for part in plan.parts(window):
            kv = blocks.index_select(1, part.blocks).view(2, part.num_rows, -1, num_kv_heads, head_dim)
            keys, values = kv[:, :, : part.length].transpose(2, 3)
            if part.is_decode:  # the queries of a group read the same keys: they are the rows of one product
                queries = q_TND[part.tokens].view(part.num_rows, num_kv_heads, -1, head_dim)
                out = F.scaled_dot_product_attention(queries, keys, values, part.mask, scale=scale)
                out_TND[part.tokens] = out.flatten(1, 2)
            else:
                queries = q_TND[part.tokens].transpose(0, 1).unsqueeze(0)
                is_causal, has_groups = part.mask is None, q_TND.shape[1] != num_kv_heads
                out = F.scaled_dot_product_attention(
                    queries, keys, values, part.mask, is_causal=is_causal, scale=scale, enable_gqa=has_groups
                )
                out_TND[part.tokens] = out[0].transpose(0, 1)
        return out_TND.flatten(1).float()


@dataclass(frozen=True)
class AttentionPart:
    """Rows that one product serves: decode rows of like context, or one row's chunk.

    tokens   of the batch, a slice where they lie together
    blocks   to read: num_rows times the same number, of which `length` positions count
    mask     added to the scores; None = causal from position 0 on
    """

    tokens: slice | Tensor
    blocks: Tensor
    num_rows: int
    length: int
    mask: Tensor | None
    is_decode: bool


class AttentionPlan:
    """How a batch's attention is cut into parts, per sliding window; made once per step, shared by the layers."""

    def __init__(self, batch: ForwardBatch, dtype: torch.dtype) -> None:
        self.block_size = batch.block_size
        self.batch = batch
        self._hidden = torch.tensor(torch.finfo(dtype).min, dtype=dtype)  # finite: −inf − −inf would be NaN
        self._parts: dict[int | None, list[AttentionPart]] = {}

    def parts(self, window: int | None) -> list[AttentionPart]:
        if window not in self._parts:
            is_decode = self.batch.lengths_S == 1
            firsts_S = self._first_blocks(window)
            decodes = (
                self._decode(rows, firsts_S, window) for rows in self._buckets(np.flatnonzero(is_decode), firsts_S)
            )
            chunks = (self._chunk(row, int(firsts_S[row]), window) for row in np.flatnonzero(~is_decode).tolist())
            self._parts[window] = [*decodes, *chunks]
        return self._parts[window]

    def _first_blocks(self, window: int | None) -> Ints:
        """The first block that any token of each row can see."""
        batch = self.batch
        if window is None:
            return np.zeros_like(batch.contexts_S)
        firsts: Ints = np.maximum(batch.contexts_S - batch.lengths_S + 1 - window, 0) // self.block_size
        return firsts

    def _buckets(self, rows: Ints, firsts_S: Ints) -> list[Ints]:
        """Decode rows whose numbers of blocks are within a factor of two: padding costs at most the double."""
        num_blocks = -(-self.batch.contexts_S[rows] // self.block_size) - firsts_S[rows]
        classes = np.ceil(np.log2(np.maximum(num_blocks, MIN_BUCKET)))
        return [rows[classes == each] for each in np.unique(classes)]

    def _decode(self, rows: Ints, firsts_S: Ints, window: int | None) -> AttentionPart:
        batch, block_size = self.batch, self.block_size
        contexts, firsts = batch.contexts_S[rows], firsts_S[rows]
        lasts = -(-contexts // block_size)
        columns = firsts[:, None] + np.arange(int((lasts - firsts).max()))
        blocks = batch.tables_SB[rows[:, None], np.minimum(columns, lasts[:, None] - 1)]
        positions = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(len(rows), -1)
        is_hidden = positions >= contexts[:, None]
        if window is not None:
            is_hidden |= positions < contexts[:, None] - window
        length = int((contexts - firsts * block_size).max())
        mask = self._mask(is_hidden[:, None, None, :length])
        return AttentionPart(
            _indices(batch.starts_S[rows]), torch.from_numpy(blocks.ravel()), len(rows), length, mask, True
        )

    def _chunk(self, row: int, first: int, window: int | None) -> AttentionPart:
        batch, block_size = self.batch, self.block_size
        start, length, context = int(batch.starts_S[row]), int(batch.lengths_S[row]), int(batch.contexts_S[row])
        blocks = torch.from_numpy(batch.tables_SB[row, first : -(-context // block_size)])
        keys = np.arange(first * block_size, context)
        mask = None
        if length < context or (window is not None and window < context):
            queries = np.arange(context - length, context)[:, None]
            mask = self._mask((keys > queries) | (keys <= queries - (window or context)))
        return AttentionPart(slice(start, start + length), blocks, 1, len(keys), mask, False)

    def _mask(self, is_hidden: NDArray[np.bool_]) -> Tensor:
        return torch.where(torch.from_numpy(is_hidden), self._hidden, self._hidden.new_zeros(()))


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies weights of this 16-bit dtype here (AVX-512 or better)."""
    if dtype == torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported())


def _indices(tokens: Ints) -> slice | Tensor:
    """Ascending token indices, as a slice (a view, no copy) where they are consecutive."""
    first, end = int(tokens[0]), int(tokens[-1]) + 1
    return slice(first, end) if end - first == len(tokens) else torch.from_numpy(tokens)
