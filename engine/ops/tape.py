"""Tape: the native operations of one forward pass, recorded once and run again in one call for batches of the same
shape: no Python between two operations. Knows operations as rows of numbers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.ops.room import Room

if TYPE_CHECKING:
    from engine.ops.native import NativeOps, NativePlan

MAX_ROWS = 64
"""Tokens of a step up to which recording pays: larger steps compute for much longer than Python takes."""
MAX_TAPES = 16

Body = Callable[..., tuple[Tensor, ...]]


class Tape:
    """Rows of operations, and the memory that they work in."""

    def __init__(self) -> None:
        self.rows = bytearray()
        self.num_rows = 0
        self.empty = Room(keeps=True).empty

    def append(self, row: bytes) -> None:
        self.rows += row
        self.num_rows += 1


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
