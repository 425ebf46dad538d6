"""Ageing: what waits too long is lifted to the class above, and stays there until it ends.

A lane's first waiting request ages while its lane has no row and is not ahead of its share. When it has waited for
`after_s`, since it came to be the first or since its lane was last served, it is lifted, and the next one's time
begins: a long backlog does not age as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.lane import Lane
from engine.lanes import Lanes
from engine.sequence import Request, Sequence
from engine.timers import Timers


class Ageing:
    """Looks at a lane at most once per `after_s`."""

    def __init__(self, lanes: Lanes, requests: dict[str, Request], after_s: float) -> None:
        self._lanes = lanes
        self._requests = requests
        self._after_s = after_s
        self._timers: Timers[Lane] = Timers()

    def watch(self, lane: Lane, now: float) -> None:
        """Something waits in this lane."""
        if lane.priority > 0 and not lane.is_watched:
            lane.is_watched = True
            lane.served_at = now
            self._timers.set(now + self._after_s, lane)

    def due(self, now: float) -> Iterator[Request]:
        """Requests to be lifted now."""
        for lane in self._timers.due(now):
            first = lane.first
            if first is None and not lane.num_running:
                lane.is_watched = False
                continue
            if first is None or lane.num_running or self._lanes.is_ahead(lane):
                lane.served_at = now
            elif self._begun(lane, first) + self._after_s <= now:
                lane.served_at = now
                yield self._requests[first.request_id]
            self._timers.set(max(now, self._begun(lane, lane.first)) + self._after_s, lane)

    def _begun(self, lane: Lane, first: Sequence | None) -> float:
        """Since when its first has waited in vain."""
        return lane.served_at if first is None else max(lane.served_at, first.waits_since)
