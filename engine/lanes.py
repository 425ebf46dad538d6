"""Lanes: waiting sequences. Priority class first; inside a class, work whose turn has come before; then lanes share by
a virtual token counter (Sheng et al., OSDI'24): the lane that was served least per weight is next. Knows no blocks and
no adapters. Every operation costs O(log n).
"""

from __future__ import annotations

import heapq
from itertools import count

from engine.sequence import Phase, Sequence

DEFERS_PER_LANE = 4
"""Of one lane so many sequences are passed over in one round of admission; then it lets other lanes be looked at."""
SWEEP_ABOVE = 1024
"""Idle lanes that would gain nothing from being remembered are dropped when so many lanes are known."""

_Entry = tuple[tuple[int, int, int], Sequence]


class LaneFull(Exception):
    """The lane holds as many waiting requests as it may."""


class Lane:
    """One fair-share group in one class. `counter` is the service it has had, divided by its weight.

    num_waiting   requests that arrived and were not yet admitted, wherever they wait
    num_open      requests that have not ended
    """

    __slots__ = (
        "counter", "is_listed", "name", "num_deferred", "num_open", "num_queued", "num_waiting", "priority", "queue",
        "weight",
    )  # fmt: skip

    def __init__(self, name: str, priority: int) -> None:
        self.name = name
        self.priority = priority
        self.weight = 1.0
        self.counter = 0.0
        self.num_waiting = 0
        self.num_open = 0
        self.num_queued = 0
        self.num_deferred = 0
        self.queue: list[_Entry] = []
        self.is_listed = False


class _Class:
    """The lanes of one priority. `listed` is a heap of (counter when put there, ticket, lane): counters only grow, so
    an entry is a lower bound and the top is right once it is fresh. `last` is the lane that left the queue last."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.listed: list[tuple[float, int, Lane]] = []
        self.resumed: list[_Entry] = []
        self.last: Lane | None = None
        self.sweep_at = SWEEP_ABOVE


class Lanes:
    """All waiting sequences that could run now as far as their adapters go. Requests `enter` when they arrive and
    `leave` when first admitted or ended; in between their sequences are pushed, popped and deferred."""

    def __init__(self, max_waiting_per_lane: int = 1024, input_cost: float = 1.0, output_cost: float = 2.0) -> None:
        self.max_waiting_per_lane = max_waiting_per_lane
        self.input_cost = input_cost
        self.output_cost = output_cost
        self.num_waiting = 0
        self._classes: dict[int, _Class] = {}
        self._ticket = count()
        self._deferred: list[tuple[Lane, Sequence]] = []
        self._withheld: list[Lane] = []

    def enter(self, name: str, priority: int, weight: float) -> Lane:
        """A request arrives. A lane that comes back from idle is lifted to where the others are: idling earns nothing.
        Raises LaneFull."""
        group = self._classes.get(priority)
        if group is None:
            group = self._classes[priority] = _Class()
            self._classes = dict(sorted(self._classes.items()))
        lane = group.lanes.get(name)
        if lane is None:
            self._sweep(group)
            lane = group.lanes[name] = Lane(name, priority)
        if lane.num_waiting >= self.max_waiting_per_lane:
            raise LaneFull(name)
        if lane.num_waiting == 0:
            lane.counter = max(lane.counter, self._floor(group))
        lane.weight = weight
        lane.num_waiting += 1
        lane.num_open += 1
        self.num_waiting += 1
        return lane

    def leave(self, lane: Lane) -> None:
        """A request of this lane is admitted for the first time, or ended before that."""
        lane.num_waiting -= 1
        self.num_waiting -= 1
        assert lane.num_waiting >= 0
        if lane.num_waiting == 0:
            self._classes[lane.priority].last = lane

    def close(self, lane: Lane) -> None:
        """A request of this lane has ended."""
        lane.num_open -= 1

    def charge(self, lane: Lane, num_input: int, num_output: int) -> None:
        lane.counter += (num_input * self.input_cost + num_output * self.output_cost) / lane.weight

    def push(self, lane: Lane, sequence: Sequence) -> None:
        """Waits in its lane by arrival; before all lanes of its class, also by arrival, if its turn has come before."""
        sequence.is_queued = True
        if sequence.goes_first:
            heapq.heappush(self._classes[lane.priority].resumed, (sequence.rank, sequence))
        else:
            heapq.heappush(lane.queue, (sequence.rank, sequence))
            lane.num_queued += 1
            self._list(lane)

    def pop(self) -> Sequence | None:
        """The sequence whose turn it is."""
        for group in self._classes.values():
            sequence = self._pop_resumed(group) or self._pop_fair(group)
            if sequence is not None:
                sequence.is_queued = False
                return sequence
        return None

    def defer(self, lane: Lane, sequence: Sequence) -> None:
        """Popped and passed over: it comes back, where it was, at `restore`."""
        lane.num_deferred += 1
        self._deferred.append((lane, sequence))

    def restore(self) -> None:
        """Ends a round of admission."""
        deferred, self._deferred = self._deferred, []
        withheld, self._withheld = self._withheld, []
        for lane, sequence in deferred:
            lane.num_deferred = 0
            if sequence.phase is Phase.WAITING:
                self.push(lane, sequence)
        for lane in withheld:
            self._list(lane)

    def discard(self, lane: Lane, sequence: Sequence) -> None:
        """It has ended, queued or not."""
        if not sequence.is_queued:
            return
        sequence.is_queued = False
        if not sequence.goes_first:
            lane.num_queued -= 1
            if len(lane.queue) > 2 * lane.num_queued + 16:
                lane.queue = [entry for entry in lane.queue if entry[1].is_queued]
                heapq.heapify(lane.queue)

    def _list(self, lane: Lane) -> None:
        if not lane.is_listed and lane.num_queued:
            lane.is_listed = True
            heapq.heappush(self._classes[lane.priority].listed, (lane.counter, next(self._ticket), lane))

    def _floor(self, group: _Class) -> float:
        """The least service that a lane which arrives now counts as having had. It never falls."""
        least = self._least_served(group) or group.last
        return least.counter if least is not None else 0.0

    def _least_served(self, group: _Class) -> Lane | None:
        """The lane with queued sequences and the smallest counter."""
        listed = group.listed
        while listed:
            counter, ticket, lane = listed[0]
            if not lane.num_queued:
                heapq.heappop(listed)
                lane.is_listed = False
            elif counter < lane.counter:
                heapq.heapreplace(listed, (lane.counter, ticket, lane))
            else:
                return lane
        return None

    def _pop_resumed(self, group: _Class) -> Sequence | None:
        while group.resumed:
            sequence = heapq.heappop(group.resumed)[1]
            if sequence.is_queued:
                return sequence
        return None

    def _pop_fair(self, group: _Class) -> Sequence | None:
        while (lane := self._least_served(group)) is not None:
            if lane.num_deferred >= DEFERS_PER_LANE:
                heapq.heappop(group.listed)
                lane.is_listed = False
                self._withheld.append(lane)
                continue
            while not (entry := heapq.heappop(lane.queue))[1].is_queued:
                pass
            lane.num_queued -= 1
            return entry[1]
        return None

    def _sweep(self, group: _Class) -> None:
        """Forgets idle lanes at or below the floor: on return they would be lifted to it anyway."""
        if len(group.lanes) < group.sweep_at:
            return
        floor = self._floor(group)
        group.lanes = {name: lane for name, lane in group.lanes.items() if lane.num_open or lane.counter > floor}
        group.sweep_at = max(SWEEP_ABOVE, 2 * len(group.lanes))
