"""Staging: adapters on their way into device memory: queued, loading, ready on the host. In which order they are read,
and how much host memory they may take meanwhile. Numbers and digests only.

    absent → queued → loading → host → (resident: ResidencyCache)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from adapters.fetcher import Fetcher, HostAdapter
from adapters.spec import AdapterRef


class State(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    HOST = "host"
    RESIDENT = "resident"


@dataclass(eq=False, slots=True)
class Entry:
    """demand   (class, ticket) while somebody waits for it: then it is pinned as soon as it is resident
    pins        sequences that hold it
    holders     requests between their first admission and their end: when it has to leave the device, it is kept on
                the host for them, so that they end on the weights that they began with
    is_kept     an operator wants it to stay
    is_doomed   to be forgotten as soon as nobody uses it
    """

    ref: AdapterRef
    size: int
    state: State = State.QUEUED
    host: HostAdapter | None = None
    pins: int = 0
    holders: int = 0
    demand: tuple[int, int] | None = None
    is_kept: bool = False
    is_doomed: bool = False
    started_at: float = 0.0

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0 or self.demand is not None or self.is_kept


class Staging:
    """entries       by digest, those in device memory too
    limit_bytes      of adapters loading, or ready on the host and not kept there for requests; one is always allowed
    staged_bytes     of all that load or are on the host
    """

    def __init__(self, fetcher: Fetcher, entries: dict[str, Entry], limit_bytes: int) -> None:
        self.fetcher = fetcher
        self.staged_bytes = 0
        self.demanded: dict[str, Entry] = {}  # not resident, with demand: as few as the scheduler allows
        self._held_bytes = 0  # on the host for requests that had begun when it left the device
        self._entries = entries
        self._limit_bytes = limit_bytes
        self._num_demands = 0
        self._spare: OrderedDict[str, Entry] = OrderedDict()  # on the host and nobody's, oldest first
        self._wanted: OrderedDict[str, Entry] = OrderedDict()  # queued without demand, by arrival

    def want(self, entry: Entry, now: float) -> None:
        """To be read when nothing more urgent is."""
        self._wanted[entry.ref.digest] = entry
        self.start_loads(now)

    def demand(self, entry: Entry, priority: int) -> None:
        """Somebody of this class waits for it."""
        digest = entry.ref.digest
        if entry.demand is None or priority < entry.demand[0]:
            self._num_demands += 1
            entry.demand = priority, self._num_demands
            self.demanded[digest] = entry
            self._wanted.pop(digest, None)
            self._spare.pop(digest, None)

    def first(self, state: State) -> Entry | None:
        """Of what is demanded and in this state, the most urgent."""
        entries = [entry for entry in self.demanded.values() if entry.state is state]
        return min(entries, key=lambda entry: entry.demand or (0, 0)) if entries else None

    def withdraw(self, entry: Entry) -> None:
        """It is demanded no more, and not resident."""
        if entry.state is State.QUEUED:
            self._wanted[entry.ref.digest] = entry
        self.spare(entry)

    def touch(self, entry: Entry) -> None:
        """Somebody has asked for it: the last to be dropped of what is spare."""
        if entry.ref.digest in self._spare:
            self._spare.move_to_end(entry.ref.digest)

    def spare(self, entry: Entry) -> None:
        """It can be dropped for another, if it is on the host for nobody."""
        if entry.state is State.HOST and entry.demand is None and not entry.holders and not entry.is_kept:
            self._spare[entry.ref.digest] = entry

    def can_stage(self, size: int) -> bool:
        loose = self.staged_bytes - self._held_bytes
        return loose == 0 or loose + size <= self._limit_bytes

    def start_loads(self, now: float) -> None:
        while self.fetcher.is_free and (entry := self._next()) is not None:
            self._wanted.pop(entry.ref.digest, None)
            entry.state, entry.started_at = State.LOADING, now
            self.staged_bytes += entry.size
            self.fetcher.submit(entry.ref)

    def arrive(self, entry: Entry, host: HostAdapter) -> None:
        """Loading → host."""
        self.staged_bytes += host.size_bytes - entry.size
        entry.state, entry.host, entry.size = State.HOST, host, host.size_bytes
        self.spare(entry)

    def fail(self, entry: Entry) -> None:
        """Loading → absent."""
        self.staged_bytes -= entry.size
        entry.state = State.QUEUED
        self.forget(entry)

    def leave(self, entry: Entry) -> None:
        """Host → resident."""
        self.staged_bytes -= entry.size
        self._held_bytes -= entry.size if entry.holders else 0
        entry.state, entry.host = State.RESIDENT, None
        self._spare.pop(entry.ref.digest, None)
        self.demanded.pop(entry.ref.digest, None)

    def take_back(self, entry: Entry, host: HostAdapter) -> None:
        """Resident → host, for the requests that hold it."""
        self.staged_bytes += entry.size
        self._held_bytes += entry.size
        entry.state, entry.host = State.HOST, host

    def let_go(self, entry: Entry) -> None:
        """The last request that held it has ended."""
        if entry.state is State.HOST:
            self._held_bytes -= entry.size
            self.spare(entry)

    def forget(self, entry: Entry) -> None:
        """An entry that is neither resident nor loading, and that nobody holds."""
        digest = entry.ref.digest
        if entry.state is State.HOST:
            self.staged_bytes -= entry.size
        self._spare.pop(digest, None)
        self._wanted.pop(digest, None)
        del self._entries[digest]

    def _next(self) -> Entry | None:
        """What is demanded first, also in place of what only lies ready; then what was wanted first."""
        entry = self.first(State.QUEUED)
        if entry is None:
            entry = next(iter(self._wanted.values()), None)
        else:
            while not self.can_stage(entry.size) and self._spare:
                self.forget(next(iter(self._spare.values())))
        return entry if entry is not None and self.can_stage(entry.size) else None
