"""Demands: the sequences whose turn has come and whose adapter is not there, by adapter. Knows no blocks and no rows.

Requests whose adapters are resident may pass while one waits for adapter memory, but only so many; then no more of them
are taken until it has room.
"""

from __future__ import annotations

from collections.abc import Iterator

from adapters.residency import ResidencyCache
from adapters.spec import AdapterRef
from engine.intake import SchedulerConfig
from engine.lane import Lane
from engine.sequence import Request, Sequence
from engine.timers import Timers


class Demands:
    """One demand per adapter, as few as `max_demands`, however many wait for it."""

    def __init__(self, config: SchedulerConfig, residency: ResidencyCache, requests: dict[str, Request]) -> None:
        self._config = config
        self._residency = residency
        self._requests = requests
        self._waiting: dict[str, dict[Sequence, float]] = {}  # by digest: who waits for it, since when
        self._timers: Timers[Sequence] = Timers()
        self._num_bypassed = 0
        self._shortage: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, digest: str) -> bool:
        return digest in self._waiting

    def of(self, digest: str) -> list[Sequence]:
        """Who waits for this adapter."""
        return list(self._waiting.get(digest, ()))

    def parked(self) -> Iterator[Sequence]:
        """All that wait for their adapter and for nothing else yet."""
        return (one for waiting in self._waiting.values() for one in waiting if not one.is_queued)

    def may_take(self, ref: AdapterRef, priority: int) -> bool:
        """False: it is resident, but enough have passed one for which adapter memory is short."""
        if ref.digest in self._waiting:
            return True
        shortage = self._note_shortage()
        is_closed = (
            shortage is not None and priority >= shortage[0] and self._num_bypassed >= self._config.max_adapter_bypass
        )
        return not (is_closed and self._residency.tier(ref.digest) == "resident")

    def acquire(self, sequence: Sequence, ref: AdapterRef, now: float) -> bool | None:
        """True: it has its adapter. False: it waits for it from now on. None: too many others are waited for.
        Raises AdapterError."""
        may_wait = ref.digest in self._waiting or len(self._waiting) < self._config.max_demands
        if self._residency.acquire(ref, now, sequence.rank[0], may_wait):
            return True
        if not may_wait:
            return None
        self._waiting.setdefault(ref.digest, {})[sequence] = now
        self._timers.set(now + self._config.adapter_wait_s, sequence)
        self._lane(sequence).parked[sequence] = None
        return False

    def arrived(self, digest: str) -> list[Sequence]:
        """The adapter is there, and kept for those that waited for it: they wait for their turn again."""
        waiting = list(self._waiting[digest])
        for sequence in waiting:
            self._lane(sequence).parked.pop(sequence, None)
        return waiting

    def failed(self, digest: str) -> list[Sequence]:
        """The adapter can't be had: who waited for it. The demand is over."""
        waiting = self.arrived(digest)
        del self._waiting[digest]
        return waiting

    def withdraw(self, sequence: Sequence) -> bool:
        """It waits no more, be it that it runs or that it has ended. False: it didn't."""
        digest = "" if sequence.adapter is None else sequence.adapter.digest
        waiting = self._waiting.get(digest, {})
        if sequence not in waiting:
            return False
        del waiting[sequence]
        self._lane(sequence).parked.pop(sequence, None)
        if not waiting:
            del self._waiting[digest]
            self._residency.withdraw(digest)
        return True

    def note_admitted(self, ref: AdapterRef) -> None:
        """A request with this adapter runs: it has passed who waits, unless it was one of them."""
        self._note_shortage()
        self._num_bypassed += ref.digest not in self._waiting

    def hasten(self, request: Request) -> None:
        """This request belongs to a higher class now."""
        ref = request.message.adapter
        if ref is not None and any(one in self._waiting.get(ref.digest, ()) for one in request.sequences):
            self._residency.hasten(ref.digest, request.lane.priority)

    def late(self, now: float) -> Iterator[Request]:
        """Those that have waited too long for their adapter to load."""
        for sequence in self._timers.due(now):
            due = self._expiry(sequence, now)
            if due is None:
                continue
            if due <= now:
                yield self._requests[sequence.request_id]
            else:
                self._timers.set(due, sequence)

    def _expiry(self, sequence: Sequence, now: float) -> float | None:
        """When it will have waited too long for its adapter to load; None if it doesn't wait for that."""
        if sequence.adapter is None or sequence.is_queued:
            return None
        digest = sequence.adapter.digest
        since = self._waiting.get(digest, {}).get(sequence)
        if since is None:
            return None
        return max(since, self._residency.loading_since(digest, now)) + self._config.adapter_wait_s

    def _lane(self, sequence: Sequence) -> Lane:
        return self._requests[sequence.request_id].lane

    def _note_shortage(self) -> tuple[int, int] | None:
        """The demand for which memory is short. Each in turn is passed by a bounded number."""
        shortage = self._residency.shortage
        if shortage != self._shortage:
            self._shortage = shortage
            self._num_bypassed = 0
        return shortage
