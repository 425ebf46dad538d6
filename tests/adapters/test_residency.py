"""ResidencyCache and Fetcher: pins, order, budgets, failures; then the same with real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.fetcher import BAD_CONTENT_S, FIRST_RETRY_S, MAX_ATTEMPTS, MISSING_S, Fetcher
from adapters.residency import Loaded, ResidencyCache
from adapters.spec import AdapterInvalid, AdapterMissing, AdapterRef, AdapterTooLarge
from tests.engine.rig import ADAPTER_BYTES, FakeBank, Host, ManualFetcher, adapter

A, B, C, D, E = (adapter(index) for index in range(5))


class Shelf:
    """A cache for `slots` adapters, with a disk under the test's hand."""

    def __init__(self, slots: int = 2, delay: int = 0, staging: int | None = None, kept: int = 0) -> None:
        self.now = 0.0
        self.bank = FakeBank(slots * ADAPTER_BYTES)
        self.reads: list[str] = []
        self.errors: dict[str, list[Exception]] = {}
        self.cache = ResidencyCache(
            self.bank, self.fetch, self.bank.budget_bytes, 1, staging, kept * ADAPTER_BYTES
        )  # fmt: skip
        self.cache.close()
        self.cache._staging.fetcher = ManualFetcher(self.fetch, 2, delay)

    def fetch(self, ref: AdapterRef) -> Host:
        self.reads.append(ref.digest)
        if self.errors.get(ref.digest):
            raise self.errors[ref.digest].pop(0)
        return Host(ref.digest, ref.size_bytes)

    def poll(self, seconds: float = 0.0) -> list[Loaded]:
        self.now += seconds
        return self.cache.poll(self.now)

    def acquire(self, ref: AdapterRef, **options: int | bool) -> bool:
        return self.cache.acquire(ref, self.now, **options)  # type: ignore[arg-type]

    def take(self, *refs: AdapterRef) -> None:
        """Makes them resident and pinned."""
        for ref in refs:
            if not self.acquire(ref):
                while Loaded(ref.digest) not in self.poll():
                    pass
                assert self.acquire(ref)
                self.cache.withdraw(ref.digest)

    @property
    def placed(self) -> set[str]:
        return set(self.bank.placed)


def digests(*refs: AdapterRef) -> set[str]:
    return {ref.digest for ref in refs}


def test_the_least_recently_used_unpinned_one_gives_way() -> None:
    """Pinned adapters are never evicted; of the others the one released longest ago goes (SC-03)."""
    shelf = Shelf(slots=4)
    shelf.take(B, A, C, D)  # B was taken least recently, and is still pinned
    shelf.cache.release(A.digest)

    shelf.take(E)

    assert shelf.placed == digests(B, C, D, E)


def test_what_is_demanded_waits_for_a_pin_to_go() -> None:
    """With everything pinned a demand waits, and is served as soon as one pin is released (HS-01)."""
    shelf = Shelf(slots=2)
    shelf.take(A, B)
    assert not shelf.acquire(C)
    for _ in range(5):
        assert shelf.poll() == []
    assert shelf.cache.shortage is not None
    assert shelf.placed == digests(A, B)

    shelf.cache.release(B.digest)

    assert shelf.poll() == [Loaded(C.digest)]
    assert shelf.placed == digests(A, C)
    assert shelf.cache.shortage is None


def test_demands_are_served_in_order_and_by_class() -> None:
    """The first demand of the highest class gets the room, and keeps it until it is taken or withdrawn."""
    shelf = Shelf(slots=1, staging=1000)
    shelf.take(A)
    assert not shelf.acquire(B, priority=2)
    assert not shelf.acquire(C, priority=1)
    assert not shelf.acquire(D, priority=1)
    for _ in range(4):
        shelf.poll()
    shelf.cache.release(A.digest)
    assert shelf.poll() == [Loaded(C.digest)]
    assert not shelf.acquire(E, priority=0)
    for _ in range(3):
        assert shelf.poll() == [], "C is kept for those who wait for it"

    shelf.cache.withdraw(C.digest)

    assert shelf.poll() == [Loaded(E.digest)]
    shelf.cache.withdraw(E.digest)
    assert shelf.poll() == [Loaded(D.digest)]
    shelf.cache.withdraw(D.digest)
    assert shelf.poll() == [Loaded(B.digest)]


def test_nobody_takes_the_room_that_a_demand_waits_for() -> None:
    """While a large adapter waits for room, a small one that would fit does not keep it from coming free."""
    shelf = Shelf(slots=3, staging=1000)
    large = adapter(8, 2 * ADAPTER_BYTES)
    shelf.take(A, B)
    assert not shelf.acquire(large)
    for _ in range(2):
        shelf.poll()
    shelf.cache.prefetch(adapter(9, 150), 0.0)
    shelf.poll()
    shelf.poll()
    assert shelf.cache.tier(adapter(9).digest) == "host"
    shelf.cache.prefetch(C, 0.0)
    shelf.poll()
    shelf.poll()

    shelf.cache.release(A.digest)
    assert not shelf.acquire(adapter(9, 150))

    assert shelf.poll() == [Loaded(large.digest)]


def test_one_load_serves_all_who_ask() -> None:
    """Single flight: however often it is asked for, an adapter is read once."""
    shelf = Shelf(delay=2)
    shelf.cache.prefetch(A, 0.0)
    for _ in range(3):
        assert not shelf.acquire(A)
        shelf.cache.prefetch(A, 0.0)
    news = [one for _ in range(5) for one in shelf.poll()]

    assert news == [Loaded(A.digest)]
    assert shelf.reads == [A.digest]


def test_prefetching_evicts_nothing() -> None:
    """What is loaded ahead goes to free room or waits on the host; acquiring it then needs no disk."""
    shelf = Shelf(slots=2, staging=1000)
    shelf.take(A, B)
    shelf.cache.release(A.digest)
    shelf.cache.prefetch(C, 0.0)
    shelf.poll()
    shelf.poll()
    assert shelf.placed == digests(A, B)
    assert shelf.cache.tier(C.digest) == "host"

    assert shelf.acquire(C)

    assert shelf.placed == digests(B, C)
    assert shelf.cache.tier(A.digest) == "disk"
    assert shelf.cache.tier(C.digest) == "resident"


def test_staging_is_bounded_but_never_blocks_a_demand() -> None:
    """Prefetching many adapters takes no more host memory than allowed; what is demanded takes the place of what only
    lies ready."""
    shelf = Shelf(slots=2, staging=2 * ADAPTER_BYTES)
    shelf.take(A, B)
    for index in range(10, 30):
        shelf.cache.prefetch(adapter(index), 0.0)
    for _ in range(30):
        shelf.poll()
    assert shelf.cache.host_bytes <= 2 * ADAPTER_BYTES
    assert not shelf.acquire(C)

    shelf.poll()
    shelf.poll()
    shelf.cache.release(A.digest)

    assert shelf.poll() == [Loaded(C.digest)]


def test_a_held_adapter_never_leaves_memory() -> None:
    """A preempted request's adapter may lose its place, but comes back from the host, byte for byte, without a read:
    the stored file may be gone by then (HS-02)."""
    shelf = Shelf(slots=1)
    shelf.take(A)
    shelf.cache.hold(A.digest)
    shelf.cache.release(A.digest)
    shelf.take(B)
    assert shelf.cache.tier(A.digest) == "host"
    shelf.cache.evict(A.digest)
    shelf.errors[A.digest] = [AdapterMissing("adapter_missing", "deleted")]

    shelf.cache.release(B.digest)
    assert shelf.acquire(A)

    assert shelf.reads.count(A.digest) == 1
    shelf.cache.release(A.digest)
    shelf.cache.drop(A.digest)
    shelf.cache.evict(A.digest)
    assert shelf.cache.tier(A.digest) == "disk"


@pytest.mark.parametrize("is_pinned", [False, True])
def test_evict_waits_for_the_last_user(is_pinned: bool) -> None:
    """A deleted adapter's bytes are freed at once if nobody runs on it, else with the last one (HS-02, HS-04)."""
    shelf = Shelf()
    shelf.take(A)
    shelf.cache.hold(A.digest)
    if not is_pinned:
        shelf.cache.release(A.digest)
        shelf.cache.drop(A.digest)

    shelf.cache.evict(A.digest)

    assert shelf.placed == (digests(A) if is_pinned else set())
    if is_pinned:
        shelf.cache.release(A.digest)
        assert shelf.placed == digests(A), "its request has not ended"
        shelf.cache.drop(A.digest)
    assert shelf.placed == set()
    assert shelf.cache.used_bytes == 0
    assert shelf.cache.states(0.0) == []


def test_evicted_while_loading_or_asked_for_again() -> None:
    """Evict during a load forgets it when it ends; a new request for the same content revokes that."""
    shelf = Shelf(delay=1)
    shelf.cache.prefetch(A, 0.0)
    shelf.poll()
    shelf.cache.evict(A.digest)
    shelf.poll()
    assert shelf.cache.states(0.0) == []

    shelf.cache.prefetch(A, 0.0)
    shelf.cache.evict(A.digest)
    assert not shelf.acquire(A)
    while not shelf.poll():
        pass
    assert shelf.acquire(A)


def test_storage_errors_are_tried_again_and_then_given_up() -> None:
    """OSError is retried with growing pauses, without keeping a thread busy; in the end the waiters are told, and the
    next request starts afresh."""
    shelf = Shelf()
    shelf.errors[A.digest] = [OSError("flaky")] * 2
    assert not shelf.acquire(A)
    news: list[Loaded] = []
    started = shelf.now
    while not news:
        news = shelf.poll(0.01)
    assert news == [Loaded(A.digest)]
    assert shelf.now - started >= 3 * FIRST_RETRY_S
    assert shelf.cache._fetcher.is_free

    shelf.errors[B.digest] = [OSError("down")] * MAX_ATTEMPTS
    assert not shelf.acquire(B)
    news = []
    while not news:
        news = shelf.poll(0.05)
    assert isinstance(news[0].error, OSError)
    assert not shelf.acquire(B)
    assert [one.error for _ in range(3) for one in shelf.poll()] == [None]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(AdapterInvalid("bad", "damaged"), BAD_CONTENT_S), (AdapterMissing("adapter_missing", "gone"), MISSING_S)],
)
def test_bad_content_is_remembered(error: Exception, seconds: float) -> None:
    """Bad content is not read again for a while, a missing digest for a moment: asking raises at once."""
    shelf = Shelf()
    shelf.errors[A.digest] = [error]
    assert not shelf.acquire(A)
    news: list[Loaded] = []
    while not news:
        news = shelf.poll()
    assert news == [Loaded(A.digest, error)]
    assert shelf.cache.states(shelf.now)[0][:2] == (A.digest, "failed")

    with pytest.raises(type(error)):
        shelf.acquire(A)
    assert shelf.reads == [A.digest]
    shelf.now += seconds + 0.1

    shelf.take(A)
    assert shelf.reads == [A.digest] * 2


def test_what_was_mended_is_read_at_once() -> None:
    """Uploading it again ends the time for which it is known to be bad."""
    shelf = Shelf()
    shelf.errors[A.digest] = [AdapterInvalid("bad", "damaged")]
    assert not shelf.acquire(A)
    while not shelf.poll():
        pass
    with pytest.raises(AdapterInvalid):
        shelf.acquire(A)

    shelf.cache.forgive(A.digest)

    shelf.take(A)
    assert shelf.reads == [A.digest] * 2


def test_what_can_never_fit_is_refused() -> None:
    """Larger than the whole memory: refused by its declared size at once, by its true size when loaded."""
    shelf = Shelf(slots=2)
    with pytest.raises(AdapterTooLarge):
        shelf.acquire(adapter(9, 3 * ADAPTER_BYTES))

    shelf.cache._fetcher._fetch = lambda ref: Host(ref.digest, 3 * ADAPTER_BYTES)
    assert not shelf.acquire(A)
    news = [one for _ in range(3) for one in shelf.poll()]
    assert isinstance(news[0].error, AdapterTooLarge)
    assert shelf.cache.used_bytes == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_bytes_are_conserved(data: st.DataObject) -> None:
    """Adapters of different sizes, taken, released, withdrawn, evicted, failing: the bank is never over budget (it
    checks), sums agree, and in the end everything can be freed."""
    shelf = Shelf(slots=3, delay=data.draw(st.integers(0, 2)), staging=data.draw(st.sampled_from([0, 150, 1000])))
    refs = [adapter(index, size) for index, size in enumerate([30, 60, 100, 150, 300])]
    pins: list[AdapterRef] = []
    waiting: set[AdapterRef] = set()
    for _ in range(data.draw(st.integers(5, 40))):
        ref = data.draw(st.sampled_from(refs))
        match data.draw(st.sampled_from(["acquire", "acquire", "release", "withdraw", "evict", "prefetch", "poll"])):
            case "acquire" if shelf.acquire(ref):
                pins.append(ref)
            case "acquire":
                waiting.add(ref)
            case "release" if pins:
                shelf.cache.release(pins.pop().digest)
            case "withdraw":
                shelf.cache.withdraw(ref.digest)
                waiting.discard(ref)
            case "evict":
                shelf.cache.evict(ref.digest)
            case "prefetch":
                shelf.cache.prefetch(ref, shelf.now)
        shelf.poll()
        assert shelf.cache.used_bytes == sum(host.size_bytes for host in shelf.bank.placed.values())
        assert digests(*pins) <= shelf.placed
    for ref in pins:
        shelf.cache.release(ref.digest)
    for ref in refs:
        shelf.cache.withdraw(ref.digest)
        shelf.cache.evict(ref.digest)
    for _ in range(20):
        shelf.poll()
    assert shelf.cache.states(shelf.now) == []
    assert (shelf.cache.used_bytes, shelf.cache.host_bytes, shelf.cache._idle_bytes) == (0, 0, 0)


def test_loads_run_in_threads_and_wake_the_waiter() -> None:
    """With real threads: acquire never waits for the disk, two loads run side by side, wait() returns when one ends."""
    gate = threading.Barrier(3, timeout=10)

    def fetch(ref: AdapterRef) -> Host:
        gate.wait()
        return Host(ref.digest, ref.size_bytes)

    bank = FakeBank(4 * ADAPTER_BYTES)
    cache = ResidencyCache(bank, fetch, bank.budget_bytes, num_threads=2, staging_bytes=1000)
    try:
        assert not cache.acquire(A, 0.0)
        assert not cache.acquire(B, 0.0)
        cache.poll(0.0)
        assert not cache.wait(0.0)
        gate.wait()
        ready: set[str] = set()
        until = time.monotonic() + 10
        while len(ready) < 2 and time.monotonic() < until:
            cache.wait(1.0)
            ready |= {one.digest for one in cache.poll(0.0)}
        assert ready == digests(A, B)
    finally:
        cache.close()


def test_a_fault_of_the_loader_reaches_the_waiter() -> None:
    """An unexpected exception in a fetch thread is reported, and the thread lives on."""
    bank = FakeBank(4 * ADAPTER_BYTES)

    def fetch(ref: AdapterRef) -> Host:
        if ref is A:
            raise ZeroDivisionError
        return Host(ref.digest, ref.size_bytes)

    cache = ResidencyCache(bank, fetch, bank.budget_bytes, num_threads=1)
    try:
        news = []
        for ref in (A, B):
            assert not cache.acquire(ref, 0.0)
            cache.poll(0.0)
            assert cache.wait(10.0)
            news += cache.poll(0.0)
        assert [type(one.error) for one in news] == [ZeroDivisionError, type(None)]
    finally:
        cache.close()


def test_what_is_kept_stays() -> None:
    """A kept adapter is read without any request, takes an idle one's place, and is not evicted until it is let go."""
    shelf = Shelf(slots=2, kept=1)
    shelf.take(A, B)
    shelf.cache.release(A.digest)
    shelf.cache.release(B.digest)
    shelf.cache.keep([C], 0.0)
    while C.digest not in shelf.placed:
        shelf.poll()
    for ref in (D, E, A, D):
        shelf.take(ref)
        shelf.cache.release(ref.digest)
        assert C.digest in shelf.placed

    shelf.cache.keep([], 0.0)
    shelf.take(A, B)

    assert shelf.placed == digests(A, B)


def test_keeping_never_takes_all() -> None:
    """Beyond keep_bytes nothing is kept, though it be said: any other adapter can still be loaded; neither is one that
    turns out to be larger than it was said to be."""
    shelf = Shelf(slots=3, kept=2)
    for _ in range(3):
        shelf.cache.keep([A, B, C], 0.0)
        shelf.poll()
    shelf.take(D)
    shelf.cache.release(D.digest)
    shelf.take(E)

    assert shelf.placed == digests(A, B, E)

    small = AdapterRef(D.digest, 8, 1)
    shelf = Shelf(slots=3, kept=2)
    shelf.cache._fetcher._fetch = lambda ref: Host(ref.digest, 3 * ADAPTER_BYTES)
    shelf.cache.keep([small], 0.0)
    shelf.poll()
    shelf.cache._fetcher._fetch = shelf.fetch
    shelf.take(A)
    assert A.digest in shelf.placed


def test_a_kept_adapter_that_fails_is_tried_when_told_again() -> None:
    """A broken file does not stay kept, and is not read in a loop."""
    shelf = Shelf(slots=2, kept=1)
    shelf.errors[A.digest] = [AdapterInvalid("bad", "bad")]
    shelf.cache.keep([A], 0.0)
    shelf.poll()
    shelf.cache.keep([A], shelf.now)
    shelf.poll(BAD_CONTENT_S + 1)
    shelf.cache.keep([A], shelf.now)
    shelf.poll()
    shelf.poll()

    assert shelf.reads == [A.digest] * 2
    assert shelf.placed == digests(A)


def test_copies_held_for_requests_do_not_stop_loads() -> None:
    """Weights that left the device and are kept on the host for requests that began on them take no staging room."""
    shelf = Shelf(slots=1, staging=ADAPTER_BYTES)
    shelf.take(A)
    shelf.cache.hold(A.digest)
    shelf.cache.release(A.digest)
    shelf.take(B)
    assert shelf.cache.tier(A.digest) == "host"
    shelf.cache.release(B.digest)
    shelf.take(C)

    assert shelf.placed == digests(C)


def closed_while_loading(load: Callable[[], object]) -> float:
    """Seconds that close() takes while a fetch thread is in `load`."""
    started = threading.Event()

    def fetch(ref: AdapterRef) -> Host:
        started.set()
        load()
        return Host(ref.digest, ref.size_bytes)

    fetcher = Fetcher(fetch, 2)
    fetcher.submit(A)
    assert started.wait(10)
    start = time.monotonic()
    fetcher.close()
    return time.monotonic() - start


def test_closing_waits_for_a_load_under_way() -> None:
    """Its thread has ended when close() returns: the end of the interpreter would abort a thread that is in torch."""
    ended: list[bool] = []

    def load() -> None:
        time.sleep(0.2)
        ended.append(True)

    closed_while_loading(load)

    assert ended


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that hangs, on a dead mount for example, keeps no process alive."""
    monkeypatch.setattr("adapters.fetcher.CLOSE_S", 0.1)
    gate = threading.Event()
    try:
        assert closed_while_loading(gate.wait) < 5
    finally:
        gate.set()
