"""ResidencyCache: which adapters lie in device memory: absent → queued → loading → host → resident. Pinned ones stay, the
least recently used of the others give way. Numbers and digests only: no tensors, names or database.

One thread (the engine's step loop) calls everything; fetch threads only read files and hand back results, which `poll`
takes up between steps.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from adapters.fetcher import Fetcher, HostAdapter
from adapters.spec import AdapterError, AdapterMissing, AdapterRef, AdapterTooLarge

MAX_ATTEMPTS = 6
FIRST_RETRY_S = 0.1
"""Storage errors are tried again after 0.1, 0.2, 0.4, … s; five waits make 3.1 s."""
BAD_CONTENT_S = 60.0
"""Content never changes under its digest: damaged files are not read again for so long."""
MISSING_S = 1.0
"""A digest that the store lacks may still be on its way to it."""
MAX_FAILURES = 1024
"""So many known failures are remembered."""


class Bank(Protocol):
    """Device memory. It never refuses: what is placed fits its budget (it compacts where it has to)."""

    def place(self, digest: str, host: Any) -> None: ...
    def read(self, digest: str) -> HostAdapter: ...
    def evict(self, digest: str) -> None: ...


class State(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    HOST = "host"
    RESIDENT = "resident"


@dataclass(eq=False, slots=True)
class _Entry:
    """demand      (priority, ticket) while somebody waits for it: then it is pinned as soon as it is resident
    pins        running sequences
    holders     requests between their first admission and their end: when it has to leave the device, it is kept on
                the host for them, so that they end on the weights that they began with
    host        while in state HOST
    not_before  time of the next attempt to load it
    """

    ref: AdapterRef
    size: int
    state: State = State.QUEUED
    host: HostAdapter | None = None
    pins: int = 0
    holders: int = 0
    demand: tuple[int, int] | None = None
    is_doomed: bool = False
    attempts: int = 0
    not_before: float = 0.0
    started_at: float | None = None

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0 or self.demand is not None


@dataclass(frozen=True, slots=True)
class Loaded:
    """News of an adapter that somebody waits for: it is resident and pinned for them (error None), or it failed."""

    digest: str
    error: Exception | None = None


class ResidencyCache:
    """Sibling of BlockPool: acquire, release, pinned while in use, LRU when free.

    bank           where resident adapters lie
    fetch          reads and packs one adapter; AdapterError = bad content, OSError = try again. Runs in threads
    budget_bytes   of the bank; resident sizes never sum to more
    staging_bytes  of adapters loading, or loaded and waiting for room; one is always allowed
    """

    def __init__(
        self,
        bank: Bank,
        fetch: Callable[[AdapterRef], HostAdapter],
        budget_bytes: int,
        num_threads: int = 2,
        staging_bytes: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_loads = 0
        self.num_evictions = 0
        self._staging_bytes = budget_bytes // 4 if staging_bytes is None else staging_bytes
        self._staged_bytes = 0
        self._idle_bytes = 0
        self._bank = bank
        self._fetcher = Fetcher(fetch, num_threads)
        self._num_loading = 0
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, _Entry] = OrderedDict()  # resident and not pinned, least recently used first
        self._spare: OrderedDict[str, _Entry] = OrderedDict()  # on the host and nobody's, oldest first
        self._wanted: OrderedDict[str, _Entry] = OrderedDict()  # queued without demand, by arrival
        self._failures: OrderedDict[str, tuple[AdapterError, float]] = OrderedDict()  # with the time of forgetting
        self._demands: list[tuple[tuple[int, int], str]] = []  # heap of queued or host entries with demand
        self._ticket = 0
        self._news: list[Loaded] = []

    # ---- questions

    def tier(self, digest: str) -> str:
        """Where it lies: "resident", "host" or "disk"."""
        entry = self._entries.get(digest)
        if entry is not None and entry.state in (State.RESIDENT, State.HOST):
            return entry.state.value
        return "disk"

    def check(self, ref: AdapterRef, now: float) -> None:
        """Raises AdapterError for an adapter that can't be used: larger than the memory, or known to be bad."""
        if ref.size_bytes > self.budget_bytes:
            raise AdapterTooLarge(
                "adapter_too_large", f"needs {ref.size_bytes} bytes of {self.budget_bytes} of adapter memory"
            )
        known = self._failures.get(ref.digest)
        if known is not None:
            error, until = known
            if now < until:
                raise error.with_traceback(None)
            del self._failures[ref.digest]

    @property
    def shortage(self) -> int | None:
        """The class of the first adapter that is loaded and waits for room; None if none does."""
        head = self._first_demand(State.HOST)
        return None if head is None or head.demand is None else head.demand[0]

    def loading_since(self, digest: str, now: float) -> float:
        """When the load of a demanded adapter began; `now` while it waits for memory; 0 while it waits for a thread."""
        entry = self._entries[digest]
        if entry.state is State.HOST or (entry.state is State.QUEUED and not self._can_stage(entry.size)):
            return now
        return entry.started_at or 0.0

    def states(self, now: float) -> list[tuple[str, str, int, int]]:
        """(digest, "loading" | "resident" | "failed", bytes, pins) of every adapter that is known here."""
        known = [
            (entry.ref.digest, "resident" if entry.state is State.RESIDENT else "loading", entry.size, entry.pins)
            for entry in self._entries.values()
        ]
        return known + [(digest, "failed", 0, 0) for digest, (_, until) in self._failures.items() if now < until]

    # ---- changes

    def prefetch(self, ref: AdapterRef) -> None:
        """A request for it has arrived, or is about to: load it when memory and threads are free."""
        entry = self._entries.get(ref.digest)
        if entry is None:
            self._wanted[ref.digest] = self._enter(ref)
            return
        entry.is_doomed = False
        for order in (self._idle, self._spare):
            if ref.digest in order:
                order.move_to_end(ref.digest)

    def acquire(self, ref: AdapterRef, now: float, priority: int = 1, may_wait: bool = True) -> bool:
        """True: resident, and pinned until `release`. False: not now; with `may_wait` it is demanded: loaded, placed and
        pinned before later demands, `poll` tells when, and `withdraw` must follow. Raises AdapterError (see check)."""
        self.check(ref, now)
        entry = self._entries.get(ref.digest)
        if entry is None:
            if not may_wait:
                return False
            entry = self._enter(ref)
        entry.is_doomed = False
        if entry.state is State.HOST and entry.demand is None and self.shortage is None and self._make_room(entry.size):
            self._place(entry)
        if entry.state is State.RESIDENT:
            if not entry.is_pinned:
                del self._idle[ref.digest]
                self._idle_bytes -= entry.size
            entry.pins += 1
            return True
        if may_wait and (entry.demand is None or priority < entry.demand[0]):
            self._demand(entry, priority)
        return False

    def release(self, digest: str) -> None:
        """One running sequence less."""
        entry = self._entries[digest]
        entry.pins -= 1
        assert entry.pins >= 0
        self._after_unpin(entry)

    def withdraw(self, digest: str) -> None:
        """Nobody waits any more for what `acquire` demanded."""
        entry = self._entries.get(digest)
        if entry is None or entry.demand is None:
            return
        entry.demand = None
        if entry.state is State.RESIDENT:
            self._after_unpin(entry)
        elif not self._drop_if_doomed(entry):
            if entry.state is State.QUEUED:
                self._wanted[digest] = entry
            elif entry.state is State.HOST and not entry.holders:
                self._spare[digest] = entry

    def hold(self, digest: str) -> None:
        """A request that has just acquired it was admitted for the first time: until `drop` it does not leave memory."""
        self._entries[digest].holders += 1

    def drop(self, digest: str) -> None:
        """A request that held it has ended."""
        entry = self._entries[digest]
        entry.holders -= 1
        assert entry.holders >= 0
        if not self._drop_if_doomed(entry) and not entry.holders and entry.state is State.HOST and not entry.demand:
            self._spare[digest] = entry

    def evict(self, digest: str) -> None:
        """No new request will ask for it: gone as soon as nobody uses it."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.is_doomed = True
            self._drop_if_doomed(entry)

    def poll(self, now: float) -> list[Loaded]:
        """Between steps: takes up finished loads, places what fits, starts further loads. Cheap when nothing happened."""
        self._fetcher.arrived.clear()
        while self._fetcher.done:
            digest, outcome = self._fetcher.done.popleft()
            self._finish(self._entries[digest], outcome, now)
        self._place_demanded()
        self._start_loads(now)
        news, self._news = self._news, []
        return news

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a load has finished (True) or the time is over."""
        return self._fetcher.arrived.wait(timeout_s)

    def close(self) -> None:
        self._fetcher.close()

    # ---- inside

    def _enter(self, ref: AdapterRef) -> _Entry:
        entry = self._entries[ref.digest] = _Entry(ref, ref.size_bytes)
        return entry

    def _demand(self, entry: _Entry, priority: int) -> None:
        self._ticket += 1
        entry.demand = (priority, self._ticket)
        self._wanted.pop(entry.ref.digest, None)
        self._spare.pop(entry.ref.digest, None)
        heapq.heappush(self._demands, (entry.demand, entry.ref.digest))

    def _first_demand(self, state: State) -> _Entry | None:
        """The first demanded entry in this state. Demands are few: whoever demands bounds them."""
        while self._demands and not self._is_open(self._demands[0]):
            heapq.heappop(self._demands)
        if not self._demands:
            return None
        live = (self._entries[item[1]] for item in sorted(self._demands) if self._is_open(item))
        return next((entry for entry in live if entry.state is state), None)

    def _is_open(self, item: tuple[tuple[int, int], str]) -> bool:
        entry = self._entries.get(item[1])
        return entry is not None and entry.demand == item[0] and entry.state is not State.RESIDENT

    def _start_loads(self, now: float) -> None:
        while self._num_loading < self._fetcher.num_threads and (entry := self._next_to_load(now)) is not None:
            self._wanted.pop(entry.ref.digest, None)
            entry.state = State.LOADING
            entry.started_at = now if entry.started_at is None else entry.started_at
            self._num_loading += 1
            self._staged_bytes += entry.size
            self._fetcher.submit(entry.ref)

    def _next_to_load(self, now: float) -> _Entry | None:
        demanded = [self._entries[item[1]] for item in sorted(self._demands) if self._is_open(item)]
        for entry in demanded:
            if entry.state is State.QUEUED and entry.not_before <= now:
                while not self._can_stage(entry.size) and self._spare:
                    self._remove(next(iter(self._spare.values())))
                return entry if self._can_stage(entry.size) else None
        first = next((entry for entry in self._wanted.values() if entry.not_before <= now), None)
        return first if first is not None and self._can_stage(first.size) else None

    def _can_stage(self, size: int) -> bool:
        return self._staged_bytes == 0 or self._staged_bytes + size <= self._staging_bytes

    def _finish(self, entry: _Entry, outcome: HostAdapter | Exception, now: float) -> None:
        self._num_loading -= 1
        self._staged_bytes -= entry.size
        if isinstance(outcome, Exception):
            self._fail(entry, outcome, now)
            return
        self.num_loads += 1
        entry.size = outcome.size_bytes
        if entry.size > self.budget_bytes:
            message = f"takes {entry.size} bytes of {self.budget_bytes} of adapter memory"
            self._fail(entry, AdapterTooLarge("adapter_too_large", message), now)
            return
        entry.state, entry.host = State.HOST, outcome
        self._staged_bytes += entry.size
        if entry.demand is None:
            self._spare[entry.ref.digest] = entry
            if not self._drop_if_doomed(entry) and self.used_bytes + entry.size <= self.budget_bytes:
                self._place(entry)

    def _fail(self, entry: _Entry, error: Exception, now: float) -> None:
        entry.attempts += 1
        if isinstance(error, OSError) and entry.attempts < MAX_ATTEMPTS:
            entry.state = State.QUEUED
            entry.not_before = now + FIRST_RETRY_S * 2 ** (entry.attempts - 1)
            if entry.demand is None:
                self._wanted[entry.ref.digest] = entry
                self._drop_if_doomed(entry)
            return
        if entry.demand is not None:
            self._news.append(Loaded(entry.ref.digest, error))
        self._remove(entry)
        if isinstance(error, AdapterError):
            keep_s = MISSING_S if isinstance(error, AdapterMissing) else BAD_CONTENT_S
            self._failures[entry.ref.digest] = (error, now + keep_s)
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)

    def _place_demanded(self) -> None:
        while (entry := self._first_demand(State.HOST)) is not None and self._make_room(entry.size):
            self._place(entry)
            self._news.append(Loaded(entry.ref.digest))

    def _make_room(self, size: int) -> bool:
        """Evicts the least recently used idle adapters until `size` fits; False, and nothing evicted, if it can't."""
        if self.used_bytes - self._idle_bytes + size > self.budget_bytes:
            return False
        while self.used_bytes + size > self.budget_bytes:
            self._leave_bank(next(iter(self._idle.values())))
        return True

    def _place(self, entry: _Entry) -> None:
        """From host to resident; idle unless somebody waits for it."""
        assert entry.host is not None
        digest = entry.ref.digest
        self._bank.place(digest, entry.host)
        entry.state, entry.host = State.RESIDENT, None
        self._staged_bytes -= entry.size
        self.used_bytes += entry.size
        self._spare.pop(digest, None)
        if not entry.is_pinned:
            self._idle[digest] = entry
            self._idle_bytes += entry.size

    def _leave_bank(self, entry: _Entry) -> None:
        """From resident to host if a request holds it, else gone."""
        digest = entry.ref.digest
        if entry.holders:
            entry.host = self._bank.read(digest)
        self._bank.evict(digest)
        del self._idle[digest]
        self._idle_bytes -= entry.size
        self.used_bytes -= entry.size
        self.num_evictions += 1
        if entry.holders:
            entry.state = State.HOST
            self._staged_bytes += entry.size
        else:
            del self._entries[digest]

    def _after_unpin(self, entry: _Entry) -> None:
        if not entry.is_pinned:
            self._idle[entry.ref.digest] = entry
            self._idle_bytes += entry.size
            self._drop_if_doomed(entry)

    def _drop_if_doomed(self, entry: _Entry) -> bool:
        if not entry.is_doomed or entry.is_pinned or entry.holders or entry.state is State.LOADING:
            return False
        if entry.state is State.RESIDENT:
            self._leave_bank(entry)
        else:
            self._remove(entry)
        return True

    def _remove(self, entry: _Entry) -> None:
        """Forgets an entry that is neither resident nor loading."""
        digest = entry.ref.digest
        if entry.state is State.HOST:
            self._staged_bytes -= entry.size
        self._spare.pop(digest, None)
        self._wanted.pop(digest, None)
        del self._entries[digest]
