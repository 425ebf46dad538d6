"""Lane: one fair-share group in one priority class, its queue and its counter of service. LaneClass: all of a class.

Every heap is cleaned lazily: an entry counts only while its ticket is the sequence's own.
"""

from __future__ import annotations

import heapq

from engine.sequence import Sequence

SWEEP_ABOVE = 1024
"""Idle lanes that would gain nothing from being remembered are dropped when so many lanes are known."""

Entry = tuple[bool, tuple[int, int, int], int, Sequence]
"""(its turn has not come before, rank, ticket, sequence)"""


def trim(heap: list[Entry], num_live: int) -> list[Entry]:
    """Without dead entries, once they are the greater part."""
    if len(heap) <= 2 * num_live + 16:
        return heap
    heap = [entry for entry in heap if entry[3].ticket == entry[2]]
    heapq.heapify(heap)
    return heap


def head(heap: list[Entry]) -> Sequence | None:
    """The first that still waits there."""
    while heap and heap[0][3].ticket != heap[0][2]:
        heapq.heappop(heap)
    return heap[0][3] if heap else None


class Lane:
    """`counter` is the service that it has had, divided by its weight.

    num_waiting   requests that arrived here and were not yet admitted, wherever they wait
    num_open      requests that have not ended
    num_queued    sequences in `queue`
    num_running   sequences that have a row
    service       cost of all that was done for it, not divided
    parked        sequences that wait for their adapter, the earliest first
    served_at     when it was last seen to have its share
    """

    __slots__ = (
        "counter", "is_listed", "is_watched", "name", "num_deferred", "num_open", "num_queued", "num_running",
        "num_waiting", "parked", "priority", "queue", "served_at", "service", "weight",
    )  # fmt: skip

    def __init__(self, name: str, priority: int) -> None:
        self.name = name
        self.priority = priority
        self.weight = 1.0
        self.counter = 0.0
        self.service = 0.0
        self.num_waiting = 0
        self.num_open = 0
        self.num_queued = 0
        self.num_running = 0
        self.num_deferred = 0
        self.served_at = 0.0
        self.queue: list[Entry] = []
        self.parked: dict[Sequence, None] = {}
        self.is_listed = False
        self.is_watched = False

    @property
    def first(self) -> Sequence | None:
        """The sequence of this lane that has waited longest for its turn."""
        return next(iter(self.parked), None) or head(self.queue)


class LaneClass:
    """The lanes of one priority. `listed` is a heap of (counter and rows when put there, ticket, lane): counters only
    grow, so an entry is a lower bound and the top is right once it is fresh. Of equal counters, as a lane has that was
    just lifted to the floor, the one with fewer rows is first: it need not wait for the other to be served.
    `resumed` is what goes before all lanes. `last` is the lane that left the queue last."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.listed: list[tuple[float, int, int, Lane]] = []
        self.resumed: list[Entry] = []
        self.num_resumed = 0
        self.last: Lane | None = None
        self.sweep_at = SWEEP_ABOVE

    @property
    def floor(self) -> float:
        """The least service that a lane which arrives now counts as having had. It never falls."""
        least = self.least_served() or self.last
        return least.counter if least is not None else 0.0

    def list(self, lane: Lane, ticket: int) -> None:
        if not lane.is_listed and lane.num_queued:
            lane.is_listed = True
            heapq.heappush(self.listed, (lane.counter, lane.num_running, ticket, lane))

    def unlist_first(self) -> None:
        heapq.heappop(self.listed)[-1].is_listed = False

    def least_served(self) -> Lane | None:
        """The lane with queued sequences and the smallest counter."""
        while self.listed:
            counter, _, ticket, lane = self.listed[0]
            if not lane.num_queued:
                self.unlist_first()
            elif counter < lane.counter:
                heapq.heapreplace(self.listed, (lane.counter, lane.num_running, ticket, lane))
            else:
                return lane
        return None

    def sweep(self) -> None:
        """Forgets idle lanes at or below the floor: on return they would be lifted to it anyway."""
        if len(self.lanes) < self.sweep_at:
            return
        floor = self.floor
        self.lanes = {name: lane for name, lane in self.lanes.items() if lane.num_open or lane.counter > floor}
        self.sweep_at = max(SWEEP_ABOVE, 2 * len(self.lanes))
