"""NativePlan: what all layers of a step read, as csrc/ has it; cut into parts that threads run side by side. Knows no
operation."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import Ints

EQUAL_CONTEXT = 1600
"""A token's attention to so many positions takes as long as its linears (the demo model)."""
UNEVEN, SNAP = 1.1, 1 / 32
"""So much longer than the mean may the longest part be; so much of it may be given away not to cut a sequence."""


class Segment(ctypes.Structure):
    """As in csrc/lora_call.h: tokens [start, end) of one adapter, and where it lies."""

    _fields_ = [
        ("start", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("arena", ctypes.c_void_p),
        ("directory", ctypes.c_void_p),
    ]


@dataclass(frozen=True, eq=False)
class NativePlan:
    """What all layers of a step read: starts, lengths and contexts [S], block tables [S, W], segments of adapters."""

    num_tokens: int
    arrays: tuple[Ints, ...]
    segments: Any
    max_rank: int

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for batches that the same operations serve, with other numbers in the arrays."""
        return self.num_tokens, self.arrays[-1].shape, len(self.segments), self.max_rank

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(array.ctypes.data for array in self.arrays)

    def copy(self) -> NativePlan:
        segments = type(self.segments)()
        ctypes.memmove(segments, self.segments, ctypes.sizeof(segments))
        return replace(self, arrays=tuple(array.copy() for array in self.arrays), segments=segments)

    def cut(self, number: int) -> list[Part]:
        """In parts that cost about the same; in one where there are none."""
        starts, lengths, contexts, _ = self.arrays
        contexts_T = np.arange(self.num_tokens) + np.repeat(contexts - lengths - starts, lengths)
        costs = np.cumsum(np.concatenate(([0.0], 1.0 + contexts_T / EQUAL_CONTEXT)))
        share = costs[-1] / number
        ends = [0, *(self._near(costs, share * i, share * SNAP) for i in range(1, number)), self.num_tokens]
        shares = np.diff(costs[ends])
        if shares.min() <= 0 or shares.max() > UNEVEN * share:
            return [Part(slice(0, self.num_tokens), self, False)]
        return [self._part(*each) for each in pairwise(ends)]

    def _near(self, costs: NDArray[np.float64], wanted: float, distance: float) -> int:
        """The token where the cost is as wanted, or the first one of a sequence where that is about the same."""
        starts = self.arrays[0]
        nearest = int(starts[np.abs(costs[starts] - wanted).argmin()])
        return nearest if abs(costs[nearest] - wanted) <= distance else int(np.abs(costs - wanted).argmin())

    def _part(self, first: int, last: int) -> Part:
        starts, lengths, contexts, tables_SB = self.arrays
        rows = slice(int(np.searchsorted(starts, first, "right")) - 1, int(np.searchsorted(starts, last)))
        begins, ends = np.maximum(starts[rows], first), np.minimum(starts[rows] + lengths[rows], last)
        left = starts[rows] + lengths[rows] - ends
        arrays = (begins - first, ends - begins, contexts[rows] - left, tables_SB[rows].copy())
        there = [each for each in self.segments if each.start < last and each.end > first]
        segments = (Segment * len(there))(
            *(Segment(max(each.start, first) - first, min(each.end, last) - first, each.arena, each.directory)
              for each in there)
        )  # fmt: skip
        plan = NativePlan(last - first, arrays, segments, self.max_rank)
        return Part(slice(first, last), plan, bool(starts[rows.start] < first))

    def take(self, other: NativePlan) -> None:
        """Becomes equal to another plan of this shape, at the addresses that it has."""
        for own, given in zip(self.arrays, other.arrays, strict=True):
            np.copyto(own, given)
        ctypes.memmove(self.segments, other.segments, ctypes.sizeof(self.segments))


@dataclass(frozen=True, eq=False)
class Part:
    """Some tokens of a batch, with a plan of their own. `waits`: the first of them attends to the ones before it."""

    tokens: slice
    plan: NativePlan
    waits: bool
