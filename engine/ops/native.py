"""NativeOps: the ops of csrc/cpu.cpp. Weights, KV and adapters in bf16, everything between two ops in fp32.

Sums run in one fixed order that depends on nothing but the row itself: a request's logits are the same bits alone and
in any batch, chunked in any way.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapters.numbers import Array
from adapters.spans import Span, move
from engine.batch import ForwardBatch
from engine.ops import LoraSlices, Moments
from engine.ops.compile import InstructionSet, load_library
from engine.ops.native_plan import NativePlan, Part, Segment
from engine.ops.room import Room, Shelf
from engine.ops.tape import Replay, Tape
from engine.quantization import Quantization

BLOCK_SIZE = 16
HEAD_DIM_UNIT = 16
TABLE_UNIT = 16
"""Block tables are as wide as a multiple of it, so that a growing context seldom changes a batch's shape."""

# As OPERATIONS in csrc/cpu.cpp:
LINEAR, LORA, WRITE_KV, ATTENTION, RMS_NORM, SILU_MUL, ROPE, DENSE, DRAW, GREEDY = range(10)
ROW = 20
ROWS = tuple(struct.Struct(f"{count}q{8 * (ROW - count)}x") for count in range(ROW + 1))
MOVED = {("BF16", "BF16"): 0, ("F32", "BF16"): 1}
FORMATS = {None: 0, 8: 1, 4: 2}


class _Slice(ctypes.Structure):
    _fields_ = [("module", ctypes.c_int64), ("first", ctypes.c_int64), ("last", ctypes.c_int64)]


class _Weights(ctypes.Structure):
    _fields_ = [("data", c_void_p), *((name, ctypes.c_int64) for name in ("N", "K", "format", "group"))]


class _Inputs(ctypes.Structure):
    _fields_ = [("moments", c_void_p), ("factor", c_void_p)]


class _Recorded(ctypes.Structure):
    _fields_ = [("tape", c_char_p), ("count", ctypes.c_int64), ("waits", ctypes.c_int64)]


@dataclass(frozen=True)
class PackedLinear:
    """W [O, H] in one of the formats of csrc/weights.h; `weights` is what the library reads, `data` holds it."""

    data: Tensor
    weights: _Weights
    outputs: int
    address: int


def supports(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether the native operations fit a model."""
    return dtype == torch.bfloat16 and head_dim % HEAD_DIM_UNIT == 0 and block_size == BLOCK_SIZE


class NativeOps:
    """See engine.ops.Ops for the equations. The KV cache's bytes are in an order of its own (see csrc/attention.h)."""

    weight_dtype = torch.bfloat16
    activation_dtype = torch.float32
    adapter_dtype = torch.bfloat16

    table_lora = None

    def __init__(self, instruction_set: InstructionSet | None = None) -> None:
        """By default for the fastest instruction set here. Raises BuildError where there is no compiler."""
        self._library = load_library(instruction_set=instruction_set)
        self._library.chorus_packed_bytes.restype = c_long
        self._library.chorus_run.argtypes = (c_char_p, c_long)
        self._library.chorus_run.restype = None
        self._library.chorus_run_all.argtypes = (POINTER(_Recorded), c_long)
        self._library.chorus_run_all.restype = None
        self._library.chorus_least_part.restype = c_long
        self.least_part = 0
        """Tokens that each thread gets at least where it runs a part of a batch alone."""
        self.rounds_activations = bool(self._library.chorus_rounds_activations())
        self.set_threads(torch.get_num_threads())
        self._slices: dict[LoraSlices, tuple[Any, int]] = {}
        self._shelf = Shelf()
        self._local = threading.local()

    def set_threads(self, num_threads: int) -> None:
        """How many threads an operation uses, the caller's included. For the whole process."""
        self._num_threads = num_threads
        self._library.chorus_set_threads(c_int(num_threads))

    def replay(self) -> Replay:
        return Replay(self)

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """Operations of this thread go to the tape instead of being run, and work in its memory."""
        self._local.tape = tape
        try:
            yield
        finally:
            self._local.tape = None

    def _run(self, operation: int, *arguments: int) -> None:
        row = ROWS[len(arguments) + 1].pack(operation, *arguments)
        tape = getattr(self._local, "tape", None)
        if tape is None:
            self._library.chorus_run(row, 1)
        else:
            tape.append(row)

    def run_all(self, tapes: list[tuple[bytes, int, bool]]) -> None:
        """Of each tape: rows of operations, how many they are, and whether it waits for the KV of those before it. Side
        by side, a thread for each."""
        made = (_Recorded * len(tapes))(*(_Recorded(*each) for each in tapes))
        self._library.chorus_run_all(made, len(tapes))

    def parts(self, plan: NativePlan) -> list[Part]:
        """One for each thread, if they are large and even enough."""
        if self._num_threads > 1 and plan.num_tokens >= self.least_part * self._num_threads:
            return plan.cut(self._num_threads)
        return [Part(slice(0, plan.num_tokens), plan, False)]

    def _empty(self, *shape: int) -> Tensor:
        tape: Tape | None = getattr(self._local, "tape", None)
        if tape is not None:
            return tape.empty(*shape)
        room: Room = self._local.__dict__.setdefault("room", Room())
        return room.empty(*shape)

    @property
    def layout(self) -> str:
        """Which library's: packed weights are good for the one that packed them."""
        return Path(self._library._name).stem

    def pack_linear(
        self, weight_OH: Tensor, quantization: Quantization | None = None, moments: Moments | None = None
    ) -> PackedLinear:
        weight_OH = weight_OH.to(torch.bfloat16).contiguous()
        outputs, inputs = weight_OH.shape
        weights = _weights(outputs, inputs, quantization)
        data = self._shelf.empty(self._library.chorus_packed_bytes(byref(weights)))
        known = None
        if moments is not None:
            known = byref(_Inputs(_at(moments.moments_HH), _at(moments.factor_HH)))
        self._library.chorus_pack(byref(weights), c_void_p(weight_OH.data_ptr()), known, c_void_p(data.data_ptr()))
        return self._packed(data, weights)

    def restore_linear(
        self, data: Tensor, outputs: int, inputs: int, quantization: Quantization | None
    ) -> PackedLinear:
        """From the `data` of one that was packed so, by the library of this `layout`."""
        weights = _weights(outputs, inputs, quantization)
        assert data.nbytes == self._library.chorus_packed_bytes(byref(weights))
        return self._packed(data, weights)

    def _packed(self, data: Tensor, weights: _Weights) -> PackedLinear:
        self.least_part = max(self.least_part, self._library.chorus_least_part(c_long(weights.format)))
        weights.data = data.data_ptr()
        return PackedLinear(data, weights, weights.N, ctypes.addressof(weights))

    def move(self, stored: Array, source: str, span: Span, buffer: Array, target: str) -> None:
        """adapters.spans.Move: without the interpreter's lock where the kinds are bf16 or, stored, fp32."""
        kinds = MOVED.get((source, target))
        if kinds is None:
            return move(stored, source, span, buffer, target)
        moves = span.moves
        self._library.chorus_move(
            c_void_p(stored.ctypes.data), c_long(kinds), c_void_p(moves.ctypes.data), c_long(len(moves)),
            c_void_p(buffer.ctypes.data),
        )  # fmt: skip

    def squares(self, packed: PackedLinear, weight_OH: Tensor) -> Tensor:
        squares_O = torch.empty(packed.outputs)
        self._library.chorus_squares(byref(packed.weights), c_void_p(squares_O.data_ptr()))
        return squares_O

    def linear(self, x_TH: Tensor, packed: PackedLinear, bias_O: Tensor | None = None) -> Tensor:
        y_TO = self._empty(x_TH.shape[0], packed.outputs)
        self._run(
            LINEAR, packed.address, _at(bias_O), x_TH.shape[0], y_TO.data_ptr(), packed.outputs, x_TH.data_ptr(),
            x_TH.stride(0), x_TH.shape[1], 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
        return y_TO

    def adapted_linear(
        self, x_TH: Tensor, packed: PackedLinear, bias_O: Tensor | None, plan: NativePlan, layer: int,
        slices: LoraSlices,
    ) -> Tensor:  # fmt: skip
        y_TO = self._empty(x_TH.shape[0], packed.outputs)
        self._run(
            LINEAR, packed.address, _at(bias_O), x_TH.shape[0], y_TO.data_ptr(), packed.outputs, x_TH.data_ptr(),
            x_TH.stride(0), x_TH.shape[1], *self._lora_arguments(plan, layer, slices),
        )  # fmt: skip
        return y_TO

    def lora(self, y_TO: Tensor, x_TH: Tensor, plan: NativePlan, layer: int, slices: LoraSlices) -> None:
        self._run(
            LORA, y_TO.data_ptr(), y_TO.stride(0), x_TH.data_ptr(), x_TH.stride(0), x_TH.shape[1],
            *self._lora_arguments(plan, layer, slices),
        )  # fmt: skip

    def _lora_arguments(self, plan: NativePlan, layer: int, slices: LoraSlices) -> tuple[int, ...]:
        if slices not in self._slices:
            made = (_Slice * len(slices))(*(_Slice(*each) for each in slices))
            self._slices[slices] = made, ctypes.addressof(made)
        num_segments = len(plan.segments)
        address = ctypes.addressof(plan.segments) if num_segments else 0
        return address, num_segments, layer, self._slices[slices][1], len(slices), plan.max_rank

    def dense(self, x_TH: Tensor, weight_OH: Tensor) -> Tensor:
        outputs, inputs = weight_OH.shape
        y_TO = self._empty(x_TH.shape[0], outputs)
        self._run(
            DENSE, x_TH.data_ptr(), x_TH.stride(0), x_TH.shape[0], inputs, weight_OH.data_ptr(), outputs,
            y_TO.data_ptr(), outputs,
        )  # fmt: skip
        return y_TO

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return self._norm(x_TH, None, weight_H, eps)

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x_TH, residual_TH, weight_H, eps), residual_TH

    def _norm(self, x: Tensor, residual: Tensor | None, weight_H: Tensor, eps: float) -> Tensor:
        heads = 1 if x.dim() == 2 else x.shape[1]
        y = self._empty(*x.shape)
        size = x.shape[-1]
        self._run(
            RMS_NORM, x.data_ptr(), x.stride(0), heads, x.shape[0] * heads, size, _at(residual), size,
            weight_H.data_ptr(), _bits(eps), y.data_ptr(), size,
        )  # fmt: skip
        return y

    def rope(self, x_TJD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        num_tokens, heads, head_dim = x_TJD.shape
        positive = sin_TD.data_ptr() + head_dim // 2 * sin_TD.itemsize
        self._run(
            ROPE, x_TJD.data_ptr(), x_TJD.stride(0), num_tokens, heads, head_dim, cos_TD.data_ptr(), positive,
            cos_TD.stride(0),
        )  # fmt: skip
        return x_TJD

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        num_rows, width = gate_up_T2I.shape
        y_TI = self._empty(num_rows, width // 2)
        self._run(
            SILU_MUL, gate_up_T2I.data_ptr(), gate_up_T2I.stride(0), num_rows, width // 2, y_TI.data_ptr(), width // 2
        )
        return y_TI

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
        num_tokens, heads, head_dim = k_TKD.shape
        self._run(
            WRITE_KV, k_TKD.data_ptr(), k_TKD.stride(0), v_TKD.data_ptr(), v_TKD.stride(0), num_tokens, heads,
            head_dim, cache.data_ptr(), cache.shape[1] // BLOCK_SIZE, slots_T.data_ptr(),
        )  # fmt: skip

    def plan(self, batch: ForwardBatch) -> NativePlan:
        placed = []
        if batch.segments:
            assert batch.bank is not None
            placed = [batch.bank.placed(segment.slot) for segment in batch.segments]
        segments = (Segment * len(placed))(
            *(
                Segment(segment.start, segment.end, each.buffer.data_ptr(), each.directory.data_ptr())
                for segment, each in zip(batch.segments, placed, strict=True)
            )
        )
        num_rows, width = batch.tables_SB.shape
        tables_SB = np.zeros((num_rows, -(-width // TABLE_UNIT) * TABLE_UNIT), np.int64)
        tables_SB[:, :width] = batch.tables_SB
        arrays = (batch.starts_S, batch.lengths_S, batch.contexts_S, tables_SB)
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
        return NativePlan(batch.num_tokens, arrays, segments, max((1, *(each.rank for each in placed))))

    def attention(self, q_TND: Tensor, cache: Tensor, plan: NativePlan, scale: float, window: int | None) -> Tensor:
        num_tokens, heads, head_dim = q_TND.shape
        out = self._empty(num_tokens, heads * head_dim)
        num_rows, width = plan.arrays[-1].shape
        self._run(
            ATTENTION, q_TND.data_ptr(), q_TND.stride(0), heads, cache.shape[2], head_dim, cache.data_ptr(),
            cache.shape[1] // BLOCK_SIZE, *plan.addresses, width, _bits(scale), window or 0, out.data_ptr(),
            heads * head_dim, num_rows,
        )  # fmt: skip
        return out

    def draw(self, logits_SV: Tensor, temperature_S: Tensor, limits: np.ndarray, draws_S: np.ndarray) -> np.ndarray:
        num_rows, size = logits_SV.shape
        limits, draws_S = np.ascontiguousarray(limits, np.float64), np.ascontiguousarray(draws_S, np.float64)
        tokens_S = np.empty(num_rows, np.int64)
        self._run(
            DRAW, logits_SV.data_ptr(), logits_SV.stride(0), num_rows, size, temperature_S.data_ptr(),
            limits.ctypes.data, draws_S.ctypes.data, tokens_S.ctypes.data,
        )  # fmt: skip
        return tokens_S

    def greedy(self, logits_SV: Tensor) -> np.ndarray:
        num_rows, size = logits_SV.shape
        found = np.empty((2, num_rows), np.int64)
        tokens_S, is_sound_S = (each.ctypes.data for each in found)
        self._run(GREEDY, logits_SV.data_ptr(), logits_SV.stride(0), num_rows, size, tokens_S, is_sound_S)
        return found


def _weights(outputs: int, inputs: int, quantization: Quantization | None) -> _Weights:
    bits, group = (None, 0) if quantization is None else (quantization.bits, quantization.group)
    return _Weights(None, outputs, inputs, FORMATS[bits], group)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=64)
def _bits(number: float) -> int:
    """A double among integers."""
    return int(struct.unpack("q", struct.pack("d", number))[0])
