"""NativeOps: the ops of cpu.cpp. Weights, KV and adapters in bf16, everything between two ops in fp32.

Sums run in one fixed order that depends on nothing but the row itself: a request's logits are the same bits alone and
in any batch, chunked in any way.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_long, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.ops import LoraSlices
from engine.ops.compile import load_library

BLOCK_SIZE = 16
HEAD_DIM_UNIT = 16
MAX_RANK = 512


class _Segment(ctypes.Structure):
    _fields_ = [("start", ctypes.c_int64), ("end", ctypes.c_int64), ("arena", c_void_p), ("directory", c_void_p)]


class _Slice(ctypes.Structure):
    _fields_ = [("module", ctypes.c_int64), ("first", ctypes.c_int64), ("last", ctypes.c_int64)]


@dataclass(frozen=True)
class PackedLinear:
    """W [O, H] as tiles of bf16 pairs."""

    data: Tensor
    outputs: int
    inputs: int


@dataclass(frozen=True)
class NativePlan:
    """Pointers into a batch, made once per step; `batch` keeps alive what they point to."""

    batch: ForwardBatch
    starts: int
    lengths: int
    contexts: int
    tables: int
    segments: Any
    max_rank: int


def supports(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether the native operations fit a model."""
    return dtype == torch.bfloat16 and head_dim % HEAD_DIM_UNIT == 0 and block_size == BLOCK_SIZE


class NativeOps:
    """See engine.ops.Ops for the equations. The KV cache's bytes are in an order of its own (see cpu.cpp)."""

    weight_dtype = torch.bfloat16
    activation_dtype = torch.float32
    adapter_dtype = torch.bfloat16

    def __init__(self) -> None:
        """Raises BuildError where there is no compiler."""
        self._library = load_library()
        self._library.chorus_packed_size.restype = c_long
        self.set_threads(torch.get_num_threads())
        self._slices: dict[LoraSlices, Any] = {}

    def set_threads(self, num_threads: int) -> None:
        """How many threads an operation uses, the caller's included. For the whole process."""
        self._library.chorus_set_threads(c_int(num_threads))

    def pack_linear(self, weight_OH: Tensor) -> PackedLinear:
        weight_OH = weight_OH.to(torch.bfloat16).contiguous()
        outputs, inputs = weight_OH.shape
        size = self._library.chorus_packed_size(c_long(outputs), c_long(inputs))
        data = torch.empty(size, dtype=torch.int32)
        self._library.chorus_pack(_at(weight_OH), c_long(outputs), c_long(inputs), _at(data))
        return PackedLinear(data, outputs, inputs)

    def linear(self, x_TH: Tensor, packed: PackedLinear, bias_O: Tensor | None = None) -> Tensor:
        y_TO = torch.empty(x_TH.shape[0], packed.outputs)
        self._library.chorus_linear(
            _at(x_TH), c_long(x_TH.shape[0]), c_long(packed.inputs), c_long(x_TH.stride(0)), _at(packed.data),
            c_long(packed.outputs), _at(bias_O), _at(y_TO), c_long(packed.outputs),
        )  # fmt: skip
        return y_TO

    def lora(self, y_TO: Tensor, x_TH: Tensor, plan: NativePlan, layer: int, slices: LoraSlices) -> None:
        if not plan.segments:
            return
        if slices not in self._slices:
            self._slices[slices] = (_Slice * len(slices))(*(_Slice(*each) for each in slices))
        self._library.chorus_lora(
            _at(y_TO), c_long(y_TO.stride(0)), _at(x_TH), c_long(x_TH.stride(0)), c_long(x_TH.shape[1]),
            c_long(len(plan.segments)), plan.segments, c_long(layer), c_long(len(slices)), self._slices[slices],
            c_long(plan.max_rank),
        )  # fmt: skip

    def dense(self, x_TH: Tensor, weight_OH: Tensor) -> Tensor:
        outputs, inputs = weight_OH.shape
        y_TO = torch.empty(x_TH.shape[0], outputs)
        self._library.chorus_dense(
            _at(x_TH), c_long(x_TH.shape[0]), c_long(inputs), c_long(x_TH.stride(0)), _at(weight_OH), c_long(outputs),
            _at(y_TO), c_long(outputs),
        )  # fmt: skip
        return y_TO

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return self._norm(x_TH, None, weight_H, eps)

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x_TH, residual_TH, weight_H, eps), residual_TH

    def _norm(self, x: Tensor, residual: Tensor | None, weight_H: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        y = torch.empty(rows.shape)
        num_rows, size = rows.shape
        self._library.chorus_rms_norm(
            _at(rows), c_long(num_rows), c_long(size), c_long(rows.stride(0)), _at(residual), c_long(size),
            _at(weight_H), c_double(eps), _at(y), c_long(size),
        )  # fmt: skip
        return y.view(x.shape)

    def rope(self, x_TJD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        num_tokens, heads, head_dim = x_TJD.shape
        half = head_dim // 2
        self._library.chorus_rope(
            _at(x_TJD), c_long(num_tokens), c_long(x_TJD.stride(0)), c_long(heads), c_long(head_dim), _at(cos_TD),
            c_void_p(sin_TD.data_ptr() + half * sin_TD.itemsize), c_long(cos_TD.stride(0)),
        )  # fmt: skip
        return x_TJD

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        num_rows, width = gate_up_T2I.shape
        y_TI = torch.empty(num_rows, width // 2)
        self._library.chorus_silu_mul(
            _at(gate_up_T2I), c_long(num_rows), c_long(width // 2), c_long(gate_up_T2I.stride(0)), _at(y_TI),
            c_long(width // 2),
        )  # fmt: skip
        return y_TI

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
        num_tokens, heads, head_dim = k_TKD.shape
        self._library.chorus_write_kv(
            _at(k_TKD), _at(v_TKD), c_long(num_tokens), c_long(k_TKD.stride(0)), c_long(v_TKD.stride(0)),
            c_long(heads), c_long(head_dim), _at(cache), c_long(cache.shape[1] // BLOCK_SIZE), _at(slots_T),
        )  # fmt: skip

    def plan(self, batch: ForwardBatch) -> NativePlan:
        segments: Any = ()
        max_rank = 1
        if batch.segments:
            assert batch.bank is not None
            placed = [batch.bank.placed(segment.slot) for segment in batch.segments]
            segments = (_Segment * len(placed))(
                *(
                    _Segment(segment.start, segment.end, each.buffer.data_ptr(), each.directory.data_ptr())
                    for segment, each in zip(batch.segments, placed, strict=True)
                )
            )
            max_rank = max(1, *(each.rank for each in placed))
        arrays = (batch.starts_S, batch.lengths_S, batch.contexts_S, batch.tables_SB)
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
        starts, lengths, contexts, tables = (array.ctypes.data for array in arrays)
        return NativePlan(batch, starts, lengths, contexts, tables, segments, max_rank)

    def attention(self, q_TND: Tensor, cache: Tensor, plan: NativePlan, scale: float, window: int | None) -> Tensor:
        num_tokens, heads, head_dim = q_TND.shape
        out = torch.empty(num_tokens, heads * head_dim)
        batch = plan.batch
        self._library.chorus_attention(
            _at(q_TND), c_long(q_TND.stride(0)), c_long(heads), c_long(cache.shape[2]), c_long(head_dim), _at(cache),
            c_long(cache.shape[1] // BLOCK_SIZE), c_long(batch.num_rows), c_void_p(plan.starts),
            c_void_p(plan.lengths), c_void_p(plan.contexts), c_void_p(plan.tables), c_long(batch.tables_SB.shape[1]),
            c_double(scale), c_long(window or 0), _at(out), c_long(heads * head_dim),
        )  # fmt: skip
        return out


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())
