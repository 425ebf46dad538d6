"""Lanes: waiting sequences. Priority class first; inside a class, work whose turn has come before; then lanes share by
a virtual token counter (Sheng et al., OSDI'24): the lane that was served least per weight is next. Knows no blocks and
no adapters. Every operation costs O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from engine.lane import Lane, LaneClass, head, trim
from engine.sequence import Phase, Request, Sequence

DEFERS_PER_LANE = 4
"""When so many sequences of one lane have been passed over in a round of admission, other lanes are looked at first."""
NO_CLASS = 1 << 30


class LaneFull(Exception):
    """The lane holds as many waiting requests as it may."""


class Lanes:
    """All waiting sequences that could run now as far as their adapters go. Requests `enter` when they arrive and
    `leave` when first admitted or ended; in between their sequences are pushed, popped and deferred.

    slack   cost by which a lane may be above the least served one of its class and still not be ahead of its share
    """

    def __init__(
        self,
        max_waiting_per_lane: int = 1024,
        input_cost: float = 1.0,
        output_cost: float = 2.0,
        slack: float = 1024.0,
    ) -> None:
        self.max_waiting_per_lane = max_waiting_per_lane
        self.input_cost = input_cost
        self.output_cost = output_cost
        self.slack = slack
        self.num_waiting = 0
        self._classes: dict[int, LaneClass] = {}
        self._tickets = count(1)
        self._deferred: list[tuple[Lane, Sequence]] = []
        self._withheld: list[Lane] = []
        self._may_defer = DEFERS_PER_LANE

    def __iter__(self) -> Iterator[Lane]:
        for group in self._classes.values():
            yield from group.lanes.values()

    def enter(self, name: str, priority: int, weight: float) -> Lane:
        """A request arrives. A lane that comes back from idle is lifted to where the others are: idling earns nothing.
        Raises LaneFull."""
        lane = self._lane(name, priority)
        if lane.num_waiting >= self.max_waiting_per_lane:
            raise LaneFull(name)
        self._open(lane)
        lane.weight = weight
        lane.num_waiting += 1
        self.num_waiting += 1
        return lane

    def leave(self, lane: Lane) -> None:
        """A request of this lane is admitted for the first time, or ended before that."""
        lane.num_waiting -= 1
        self.num_waiting -= 1
        assert lane.num_waiting >= 0
        if lane.num_waiting == 0:
            self._classes[lane.priority].last = lane

    def close(self, request: Request) -> None:
        """The request has ended."""
        for lane in {request.lane, request.home}:
            lane.num_open -= 1

    def charge(self, lane: Lane, num_input: float, num_output: float) -> None:
        cost = num_input * self.input_cost + num_output * self.output_cost
        lane.service += cost
        lane.counter += cost / lane.weight

    def bill(self, request: Request, num_input: float, num_output: float) -> None:
        """Charges where the request runs, and where it came from."""
        self.charge(request.lane, num_input, num_output)
        if request.home is not request.lane:
            self.charge(request.home, num_input, num_output)

    def is_ahead(self, lane: Lane) -> bool:
        """It has had more than its share, compared with the least served lane that waits in its class."""
        least = self._classes[lane.priority].least_served()
        return least is not None and lane.counter > least.counter + self.slack / lane.weight

    def lift(self, request: Request) -> None:
        """All of this request belongs to the class above from now on, in the lane of the same name."""
        old = request.lane
        lane = self._lane(old.name, old.priority - 1)
        self._open(lane)
        lane.weight = old.weight
        if request.home is not old:
            old.num_open -= 1
        for sequence in request.sequences:
            self._move(sequence, old, lane)
        request.lane = lane

    def push(self, lane: Lane, sequence: Sequence) -> None:
        """Waits in its lane by arrival; before all lanes of its class, also by arrival, if its turn has come before."""
        ticket = sequence.ticket = next(self._tickets)
        group = self._classes[lane.priority]
        entry = not sequence.goes_first, sequence.rank, ticket, sequence
        heapq.heappush(lane.queue, entry)
        lane.num_queued += 1
        if sequence.goes_first:
            heapq.heappush(group.resumed, entry)
            group.num_resumed += 1
        group.list(lane, next(self._tickets))

    def least_served(self, priority: int) -> Lane | None:
        """The lane whose turn it is in this class, leaving aside what was resumed."""
        group = self._classes.get(priority)
        return None if group is None else group.least_served()

    def pop(self, below: int = NO_CLASS) -> Sequence | None:
        """The sequence whose turn it is, among those of classes above the class `below`."""
        sequence = self._next(below)
        while sequence is None and self._withheld:
            self._may_defer += DEFERS_PER_LANE
            self._list_withheld()
            sequence = self._next(below)
        return sequence

    def pop_from(self, lane: Lane) -> Sequence | None:
        """The first of this lane, whoever else waits."""
        sequence = head(lane.queue)
        if sequence is not None:
            self.discard(lane, sequence)
        return sequence

    def defer(self, lane: Lane, sequence: Sequence) -> None:
        """Popped and passed over: it comes back, where it was, at `restore`."""
        lane.num_deferred += 1
        self._deferred.append((lane, sequence))

    def restore(self) -> None:
        """Ends a round of admission."""
        deferred, self._deferred = self._deferred, []
        self._may_defer = DEFERS_PER_LANE
        for lane, sequence in deferred:
            lane.num_deferred = 0
            if sequence.phase is Phase.WAITING:
                self.push(lane, sequence)
        self._list_withheld()

    def discard(self, lane: Lane, sequence: Sequence) -> None:
        """It waits here no more, if it did."""
        if not sequence.is_queued:
            return
        sequence.ticket = 0
        lane.num_queued -= 1
        lane.queue = trim(lane.queue, lane.num_queued)
        if sequence.goes_first:
            group = self._classes[lane.priority]
            group.num_resumed -= 1
            group.resumed = trim(group.resumed, group.num_resumed)

    def _next(self, below: int) -> Sequence | None:
        for priority, group in self._classes.items():
            if priority >= below:
                break
            sequence = head(group.resumed) or self._first_fair(group)
            if sequence is not None:
                lane = group.lanes[sequence.lane_name]
                self.discard(lane, sequence)
                return sequence
        return None

    def _lane(self, name: str, priority: int) -> Lane:
        group = self._classes.get(priority)
        if group is None:
            group = self._classes[priority] = LaneClass()
            self._classes = dict(sorted(self._classes.items()))
        lane = group.lanes.get(name)
        if lane is None:
            group.sweep()
            lane = group.lanes[name] = Lane(name, priority)
        return lane

    def _open(self, lane: Lane) -> None:
        if lane.num_waiting == 0 and lane.num_queued == 0:
            lane.counter = max(lane.counter, self._classes[lane.priority].floor)
        lane.num_open += 1

    def _move(self, sequence: Sequence, old: Lane, new: Lane) -> None:
        if sequence.phase is Phase.DONE:
            return
        is_queued = sequence.is_queued
        self.discard(old, sequence)
        if sequence in old.parked:
            del old.parked[sequence]
            new.parked[sequence] = None
        if sequence.phase is Phase.RUNNING:
            old.num_running -= 1
            new.num_running += 1
        sequence.rank = (new.priority, *sequence.rank[1:])
        if is_queued:
            self.push(new, sequence)

    def _list_withheld(self) -> None:
        withheld, self._withheld = self._withheld, []
        for lane in withheld:
            self._classes[lane.priority].list(lane, next(self._tickets))

    def _first_fair(self, group: LaneClass) -> Sequence | None:
        while (lane := group.least_served()) is not None:
            if lane.num_deferred < self._may_defer:
                return head(lane.queue)
            group.unlist_first()
            self._withheld.append(lane)
        return None
