"""Tape: the native operations of one forward pass, recorded once and run again in one call for batches of the same
shape: no Python between two operations. Knows operations as rows of numbers only."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.ops.native import NativeOps, NativePlan

MAX_ROWS = 64
"""Tokens of a step up to which recording pays: larger steps compute for much longer than Python takes."""
MAX_TAPES = 16
ALIGNMENT = 64

Body = Callable[..., tuple[Tensor, ...]]


class Tape:
    """Rows of operations, and the memory that they work in."""

    def __init__(self) -> None:
        self.rows = bytearray()
        self.num_rows = 0
        self._memory: list[np.ndarray] = []
        self._free: list[int] = []

    def append(self, row: bytes) -> None:
        self.rows += row
        self.num_rows += 1

    def empty(self, *shape: int) -> Tensor:
        """A tensor whose memory is used again once nothing of this recording can see it: as torch.empty, but what is
        freed stays the tape's, and as warm in the cache as it was when recorded."""
        size = math.prod(shape)
        fitting = [index for index in self._free if len(self._memory[index]) >= size]
        if fitting:
            index = min(fitting, key=lambda each: len(self._memory[each]))
            self._free.remove(index)
        else:
            index = len(self._memory)
            raw = np.empty(size * 4 + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            self._memory.append(raw[start : start + size * 4].view(np.float32))
        view = self._memory[index][:size]
        at_end = weakref.finalize(view, self._free.append, index)  # the tensor's storage and all its views hold it
        at_end.atexit = False
        return torch.from_numpy(view).view(shape)


class Recording:
    """A tape with its inputs, plan and outputs: whoever runs it again writes the new inputs and plan there first."""

    def __init__(self, tape: Tape, inputs: tuple[Tensor, ...], plan: NativePlan, outputs: tuple[Tensor, ...]) -> None:
        self._inputs = inputs
        self._plan = plan
        self._tape = tape
        self._rows = bytes(tape.rows)
        self.outputs = outputs

    def run(self, ops: NativeOps, inputs: tuple[Tensor, ...], plan: NativePlan) -> tuple[Tensor, ...]:
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        self._plan.take(plan)
        ops.run_rows(self._rows, self._tape.num_rows)
        return self.outputs


class Replay:
    """Runs a body, and again from its recording. One body and one set of weights and KV for the life of a Replay; what
    the body does may depend on the shapes of inputs and plan only, and all of it must be native operations."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()

    def __call__(self, body: Body, inputs: tuple[Tensor, ...], plan: Any) -> tuple[Tensor, ...]:
        """body(*inputs, plan). The outputs are good until the next call."""
        if len(inputs[0]) > MAX_ROWS:
            return body(*inputs, plan)
        key = (*(each.shape for each in inputs), plan.shape)
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key].run(self._ops, inputs, plan)
        recording = self._recordings[key] = self._record(body, inputs, plan)
        if len(self._recordings) > MAX_TAPES:
            self._recordings.popitem(last=False)
        return recording.outputs

    def _record(self, body: Body, inputs: tuple[Tensor, ...], plan: NativePlan) -> Recording:
        tape = Tape()
        own_inputs, own_plan = tuple(each.clone() for each in inputs), plan.copy()
        with self._ops.recording(tape):
            outputs = body(*own_inputs, own_plan)
        return Recording(tape, own_inputs, own_plan, outputs)
