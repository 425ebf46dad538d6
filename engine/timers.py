"""Timers: things to look at again when their time has come. Nothing is cancelled: who looks checks whether it still
matters. Knows no clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Timers(Generic[Item]):
    """Of equal times, what was set first is due first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._num_set = 0

    def set(self, due: float, item: Item) -> None:
        self._num_set += 1
        heapq.heappush(self._heap, (due, self._num_set, item))

    def due(self, now: float) -> Iterator[Item]:
        """What is due; more may be set on the way, later than `now`."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]
