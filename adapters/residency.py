"""ResidencyCache: which adapters lie in device memory. Pinned ones stay; the least recently used others give way.
Numbers and digests only: no tensors, names or database.

One thread, the engine's step loop, calls everything; what the fetch threads have read is taken up by `poll`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from adapters.fetcher import Fetcher, HostAdapter, Outcome
from adapters.spec import AdapterRef, AdapterTooLarge
from adapters.staging import Entry, Staging, State


class Bank(Protocol):
    """Device memory. It never refuses: what is placed fits its budget (it compacts where it has to)."""

    def place(self, digest: str, host: Any) -> None: ...
    def read(self, digest: str) -> HostAdapter: ...
    def evict(self, digest: str) -> None: ...


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
    keep_bytes     of adapters that `keep` may hold in the bank
    """

    def __init__(
        self,
        bank: Bank,
        fetch: Callable[[AdapterRef], HostAdapter],
        budget_bytes: int,
        num_threads: int = 2,
        staging_bytes: int | None = None,
        keep_bytes: int = 0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.keep_bytes = keep_bytes
        self.used_bytes = 0
        self.num_loads = 0
        self.num_evictions = 0
        self.place_s = 0.0
        self._idle_bytes = 0
        self._bank = bank
        self._entries: dict[str, Entry] = {}
        self._idle: OrderedDict[str, Entry] = OrderedDict()  # resident and not pinned, least recently used first
        self._kept: dict[str, Entry] = {}
        staging_bytes = budget_bytes // 4 if staging_bytes is None else staging_bytes
        self._staging = Staging(Fetcher(fetch, num_threads), self._entries, staging_bytes)

    @property
    def _fetcher(self) -> Fetcher:
        return self._staging.fetcher

    @property
    def is_loading(self) -> bool:
        return self._fetcher.num_loading > 0

    @property
    def host_bytes(self) -> int:
        """Of adapters that load, or lie ready, on the host."""
        return self._staging.staged_bytes

    @property
    def read_s(self) -> float:
        """Seconds that reading and packing has taken, of all threads together."""
        return self._fetcher.busy_s

    @property
    def shortage(self) -> tuple[int, int] | None:
        """The first demand, (class, ticket), whose adapter is loaded and waits for room; None if none does."""
        entry = self._staging.first(State.HOST)
        return None if entry is None else entry.demand

    @property
    def shortage_bytes(self) -> int:
        """How many more bytes would have to be unpinned for it."""
        entry = self._staging.first(State.HOST)
        return 0 if entry is None else self.used_bytes - self._idle_bytes + entry.size - self.budget_bytes

    def unpinned_bytes(self, digest: str, num_pins: int) -> int:
        """What there would be to evict if `num_pins` running sequences released it."""
        entry = self._entries[digest]
        return entry.size if entry.pins == num_pins and entry.demand is None and not entry.is_kept else 0

    def tier(self, digest: str) -> str:
        """Where it lies: "resident", "host" or "disk"."""
        entry = self._entries.get(digest)
        return entry.state.value if entry is not None and entry.state in (State.RESIDENT, State.HOST) else "disk"

    def states(self, now: float) -> list[tuple[str, str, int, int]]:
        """(digest, "loading" | "resident" | "failed", bytes, pins) of every adapter that is known here."""
        known = [
            (entry.ref.digest, "resident" if entry.state is State.RESIDENT else "loading", entry.size, entry.pins)
            for entry in self._entries.values()
        ]
        return known + [(digest, "failed", 0, 0) for digest in self._fetcher.failures(now)]

    def check(self, ref: AdapterRef, now: float) -> None:
        """Raises AdapterError for an adapter that can't be used: larger than the memory, or known to be bad."""
        if ref.size_bytes > self.budget_bytes:
            raise self._too_large(ref.size_bytes)
        error = self._fetcher.failure(ref.digest, now)
        if error is not None:
            raise error.with_traceback(None)

    def forgive(self, digest: str) -> None:
        """It was uploaded again: what was known to be wrong with it may be so no more."""
        self._fetcher.forgive(digest)

    def loading_since(self, digest: str, now: float) -> float:
        """When the load of a demanded adapter began; `now` while it waits for memory; 0 while it waits for a thread."""
        entry = self._entries[digest]
        if entry.state is State.HOST or (entry.state is State.QUEUED and not self._staging.can_stage(entry.size)):
            return now
        return entry.started_at

    def prefetch(self, ref: AdapterRef, now: float) -> bool:
        """A request for it has arrived, or is about to: load it when memory and threads are free. True: it was not
        known, and will be read for this one."""
        entry = self._entries.get(ref.digest)
        if entry is None:
            self._staging.want(self._enter(ref), now)
            return True
        entry.is_doomed = False
        if ref.digest in self._idle:
            self._idle.move_to_end(ref.digest)
        self._staging.touch(entry)
        return False

    def keep(self, refs: Iterable[AdapterRef], now: float) -> None:
        """These and no others are to stay in the bank, as far as `keep_bytes` allows, and are read if they are absent.
        To be told again: one whose load has failed is then tried again."""
        wanted = {ref.digest: ref for ref in refs}
        for digest in [digest for digest in self._kept if digest not in wanted]:
            self._unkeep(digest)
        room = self.keep_bytes - sum(entry.size for entry in self._kept.values())
        for digest, ref in wanted.items():
            if digest in self._kept or self._fetcher.failure(digest, now) is not None:
                continue
            entry = self._entries.get(digest)
            size = ref.size_bytes if entry is None else entry.size
            if size > room:
                continue
            room -= size
            if entry is None:
                entry = self._enter(ref)
                self._staging.want(entry, now)
            entry.is_kept, entry.is_doomed = True, False
            self._kept[digest] = entry
            self._take_from_idle(entry)

    def acquire(self, ref: AdapterRef, now: float, priority: int = 1, may_wait: bool = True) -> bool:
        """True: resident, and pinned until `release`. False: not now; with `may_wait` it is demanded, that is loaded,
        placed and pinned before later demands of its class; `poll` tells when, and `withdraw` must follow.
        Raises AdapterError (see check)."""
        self.check(ref, now)
        entry = self._entries.get(ref.digest)
        if entry is None:
            if not may_wait:
                return False
            entry = self._enter(ref)
        entry.is_doomed = False
        if entry.state is State.HOST and self.shortage is None and self._make_room(entry.size):
            self._place(entry)
        if entry.state is State.RESIDENT:
            self._take_from_idle(entry)
            entry.pins += 1
            return True
        if may_wait:
            self._staging.demand(entry, priority)
        return False

    def hasten(self, digest: str, priority: int) -> None:
        """Whoever waits for it belongs to this class now."""
        entry = self._entries[digest]
        if entry.demand is not None and priority < entry.demand[0]:
            entry.demand = priority, entry.demand[1]

    def pin(self, digest: str) -> None:
        """One more running sequence of what is pinned already."""
        assert self._entries[digest].pins > 0
        self._entries[digest].pins += 1

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
        self._staging.demanded.pop(digest, None)
        if entry.state is State.RESIDENT:
            self._after_unpin(entry)
        elif not self._drop_if_doomed(entry):
            self._staging.withdraw(entry)

    def hold(self, digest: str) -> None:
        """A request that has just acquired it was admitted: until `drop` it does not leave memory altogether."""
        self._entries[digest].holders += 1

    def drop(self, digest: str) -> None:
        """A request that held it has ended."""
        entry = self._entries[digest]
        entry.holders -= 1
        assert entry.holders >= 0
        if entry.holders == 0:
            self._staging.let_go(entry)
        self._drop_if_doomed(entry)

    def evict(self, digest: str) -> None:
        """No new request will ask for it: gone as soon as nobody uses it."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.is_doomed = True
            self._drop_if_doomed(entry)

    def poll(self, now: float) -> list[Loaded]:
        """Between steps: takes up finished loads, places what fits, starts further loads. Cheap when there are none."""
        news = []
        for digest, outcome in self._fetcher.poll(now):
            error = self._finish(self._entries[digest], outcome, now)
            if error is not None and self._staging.demanded.pop(digest, None) is not None:
                news.append(Loaded(digest, error))
        while (entry := self._staging.first(State.HOST)) is not None and self._make_room(entry.size):
            self._place(entry)
            news.append(Loaded(entry.ref.digest))
        for entry in self._kept.values():
            if entry.state is State.HOST and self.shortage is None and self._make_room(entry.size):
                self._place(entry)
        self._staging.start_loads(now)
        return news

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a load has ended (True) or the time is over."""
        return self._fetcher.wait(timeout_s)

    def close(self) -> None:
        self._fetcher.close()

    def _enter(self, ref: AdapterRef) -> Entry:
        entry = self._entries[ref.digest] = Entry(ref, ref.size_bytes)
        return entry

    def _finish(self, entry: Entry, outcome: Outcome, now: float) -> Exception | None:
        """From loading to host, and on if there is room; or forgotten, with the reason."""
        if not isinstance(outcome, Exception) and outcome.size_bytes > self.budget_bytes:
            too_large = self._too_large(outcome.size_bytes)
            self._fetcher.remember(entry.ref.digest, too_large, now)
            outcome = too_large
        if isinstance(outcome, Exception):
            self._kept.pop(entry.ref.digest, None)
            self._staging.fail(entry)
            return outcome
        self.num_loads += 1
        self._staging.arrive(entry, outcome)
        if sum(one.size for one in self._kept.values()) > self.keep_bytes and entry.is_kept:
            self._unkeep(entry.ref.digest)  # it is larger than it was said to be
        elif (
            not self._drop_if_doomed(entry)
            and entry.demand is None
            and self.used_bytes + entry.size <= self.budget_bytes
        ):
            self._place(entry)
        return None

    def _too_large(self, size: int) -> AdapterTooLarge:
        return AdapterTooLarge("adapter_too_large", f"takes {size} bytes of {self.budget_bytes} of adapter memory")

    def _unkeep(self, digest: str) -> None:
        entry = self._kept.pop(digest)
        entry.is_kept = False
        if entry.state is State.RESIDENT:
            self._after_unpin(entry)
        elif not self._drop_if_doomed(entry):
            self._staging.spare(entry)

    def _make_room(self, size: int) -> bool:
        """Evicts the least recently used idle adapters until `size` fits; False, and nothing evicted, if it can't."""
        if self.used_bytes - self._idle_bytes + size > self.budget_bytes:
            return False
        while self.used_bytes + size > self.budget_bytes:
            self._leave_bank(next(iter(self._idle.values())))
        return True

    def _place(self, entry: Entry) -> None:
        """From host to resident; idle unless somebody waits for it."""
        start = time.perf_counter()
        self._bank.place(entry.ref.digest, entry.host)
        self.place_s += time.perf_counter() - start
        self._staging.leave(entry)
        self.used_bytes += entry.size
        self._after_unpin(entry)

    def _leave_bank(self, entry: Entry) -> None:
        """From resident to host if a request holds it, else gone."""
        digest = entry.ref.digest
        host = self._bank.read(digest) if entry.holders else None
        self._bank.evict(digest)
        self._take_from_idle(entry)
        self.used_bytes -= entry.size
        self.num_evictions += 1
        if host is not None:
            self._staging.take_back(entry, host)
        else:
            del self._entries[digest]

    def _take_from_idle(self, entry: Entry) -> None:
        if self._idle.pop(entry.ref.digest, None) is not None:
            self._idle_bytes -= entry.size

    def _after_unpin(self, entry: Entry) -> None:
        if not entry.is_pinned:
            self._idle[entry.ref.digest] = entry
            self._idle_bytes += entry.size
            self._drop_if_doomed(entry)

    def _drop_if_doomed(self, entry: Entry) -> bool:
        if not entry.is_doomed or entry.is_pinned or entry.holders or entry.state is State.LOADING:
            return False
        if entry.state is State.RESIDENT:
            self._leave_bank(entry)
        else:
            self._staging.forget(entry)
        return True
