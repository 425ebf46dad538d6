"""Tape: the native operations of one forward pass, recorded once and run again in one call for batches of the same
shape: no Python between two operations. Where a batch is large enough, each thread runs one part of it from end to end.
Knows operations as rows of numbers only."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.ops.room import Room

if TYPE_CHECKING:
    from engine.ops.native import NativeOps
    from engine.ops.native_plan import NativePlan

MAX_ROWS = 64
"""Tokens of a step up to which recording pays: larger steps compute for much longer than Python takes."""
MAX_TAPES = 32

Body = Callable[..., tuple[Tensor, ...]]


class Tape:
    """Rows of operations, and the memory that they work in."""

    def __init__(self, room: Room) -> None:
        self.rows = bytearray()
        self.num_rows = 0
        self.empty = room.empty

    def append(self, row: bytes) -> None:
        self.rows += row
        self.num_rows += 1


class Recording:
    """A tape with its inputs, plan and outputs: before it runs, new inputs and a new plan are written there."""

    def __init__(self, tape: Tape, inputs: tuple[Tensor, ...], plan: NativePlan, outputs: tuple[Tensor, ...]) -> None:
        self._inputs = inputs
        self._plan = plan
        self._tape = tape
        self.rows = bytes(tape.rows)
        self.num_rows = tape.num_rows
        self.outputs = outputs

    def take(self, inputs: tuple[Tensor, ...], plan: NativePlan) -> None:
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        self._plan.take(plan)


class Replay:
    """Runs a body, and again from its recording. One body and one set of weights and KV for the life of a Replay; what
    the body does may depend on the shapes of inputs and plan only, and all of it must be native operations. Tokens meet
    in attention alone."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._rooms: defaultdict[int, Room] = defaultdict(lambda: Room(keeps=True))

    def __call__(self, body: Body, inputs: tuple[Tensor, ...], plan: NativePlan) -> tuple[Tensor, ...]:
        """body(*inputs, plan). The outputs are good until the next call."""
        parts = self._ops.parts(plan)
        is_kept = len(inputs[0]) <= MAX_ROWS
        if len(parts) == 1 and not is_kept:
            return body(*inputs, plan)
        recordings = []
        for number, part in enumerate(parts):
            own_inputs = tuple(each[part.tokens] for each in inputs)
            if is_kept:
                recording = self._recording(number, body, own_inputs, part.plan)
                recording.take(own_inputs, part.plan)
            else:
                recording = self._record(self._rooms[number], body, own_inputs, part.plan)
            recordings.append(recording)
        self._ops.run_all(
            [
                (recording.rows, recording.num_rows, part.waits)
                for recording, part in zip(recordings, parts, strict=True)
            ]
        )
        if len(recordings) == 1:
            return recordings[0].outputs
        return tuple(torch.cat(each) for each in zip(*(recording.outputs for recording in recordings), strict=True))

    def _recording(self, number: int, body: Body, inputs: tuple[Tensor, ...], plan: NativePlan) -> Recording:
        """Parts that run at the same time must not share one, so their numbers are part of what it is known by."""
        key = (number, *(each.shape for each in inputs), plan.shape)
        if key in self._recordings:
            self._recordings.move_to_end(key)
        else:
            own_inputs = tuple(each.clone() for each in inputs)
            self._recordings[key] = self._record(Room(keeps=True), body, own_inputs, plan.copy())
            if len(self._recordings) > MAX_TAPES:
                self._recordings.popitem(last=False)
        return self._recordings[key]

    def _record(self, room: Room, body: Body, inputs: tuple[Tensor, ...], plan: NativePlan) -> Recording:
        tape = Tape(room)
        with self._ops.recording(tape):
            outputs = body(*inputs, plan)
        return Recording(tape, inputs, plan, outputs)
