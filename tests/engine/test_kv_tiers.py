"""KV tiers by numbers: blocks that leave the device come back with the right content, or are computed again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_pool import owner_in
from engine.cost_model import STEP_COPY_S, CostModel
from engine.kv_disk_index import DiskIndex
from engine.kv_host_pool import HostPool
from engine.kv_tiers import READ_WAIT_S
from engine.kv_traffic import TRIAL_EVERY, WRITE_PAUSE_S
from engine.protocol import Generate, Refused
from tests.engine import stories
from tests.engine.rig import Rig, prompt
from tests.engine.stories import Ask, tell

SETTINGS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def ask(rig: Rig, id: str, length: int = 24, family: int = 0, tokens: int = 2, **more: Any) -> Generate:
    return stories.ask(rig, id, Ask(length, family, tokens, **more))


def flush(rig: Rig) -> None:
    """Every block of the device gets a new owner."""
    for family in range(100, 100 + rig.num_blocks // 6 + 1):
        ask(rig, f"flush{len(rig.outputs)}", 22, family)
        rig.run()


def forget_host(rig: Rig) -> None:
    """Whatever the host holds and nobody copies is forgotten."""
    slots = [slot for slot in iter(rig.tiers.host.take, None)]
    for slot in slots:
        rig.tiers.host.unpin(slot)


def cached(rig: Rig, id: str) -> int:
    return next(chunk.num_cached_tokens for chunk in rig.chunks if chunk.id == id)


# ---- the pools


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=60))
def test_every_slot_is_free_idle_or_pinned(num_slots: int, actions: list[tuple[int, int]]) -> None:
    """Whatever is taken, named, pinned and unpinned: slots are conserved, and what is pinned is never given away."""
    pool, pins = HostPool(num_slots), list[tuple[int, bytes | None]]()
    for kind, number in actions:
        key = bytes([number])
        if kind == 0:
            slot = pool.take()
            assert (slot is None) == (len({one for one, _ in pins}) == num_slots)
            if slot is not None:
                assert slot not in {one for one, _ in pins}
                is_new = key not in pool
                if is_new:
                    pool.know(slot, key)
                pins.append((slot, key if is_new else None))
        elif kind == 1 and (slot := pool.find(key)) is not None:
            pool.pin(slot)
            pins.append((slot, key))
        elif kind == 2 and pins:
            pool.unpin(pins.pop(number % len(pins))[0])
        pool.check(len(pins))
        assert all(key is None or pool.find(key) == slot for slot, key in pins)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(1, 20)), max_size=60))
def test_the_disk_stays_below_its_limit(limit: int, actions: list[tuple[int, int, int]]) -> None:
    """Bytes promised and written are never above the limit, and never negative; a promise is not taken back."""
    index, promised = DiskIndex(limit, [(bytes([100 + i]), 7) for i in range(5)]), set[bytes]()
    index.trim()
    for kind, number, size in actions:
        key = bytes([number])
        if kind == 0:
            gone = index.promise(key, size)
            if gone is not None:
                assert not promised & set(gone)
                promised.add(key)
        elif kind == 1 and key in promised:
            index.keep(key)
            promised.discard(key)
        elif kind == 2:
            index.drop(key)
            promised.discard(key)
        elif key in index:
            index.touch(key)
        index.check()


def test_the_cost_model_learns() -> None:
    """What a copy and a prompt cost is corrected by what is seen; decoding steps say nothing about prompts."""
    cost = CostModel(1000, 10, copy_speed=1000.0, compute_speed=5.0)
    assert cost.prefers_copy
    cost.note_step(10, 8, 1e-9)
    assert cost.compute_speed == 5.0
    for _ in range(100):
        cost.note_step(1000, 4, 1.0)
    assert not cost.prefers_copy
    for _ in range(100):
        cost.note_copy(10**6, 0.001)
    assert cost.prefers_copy
    assert cost.max_loads == int(STEP_COPY_S * cost.copy_speed / 1000)
    assert cost.prefers_disk(100)
    assert not cost.prefers_disk(0)
    for _ in range(200):
        cost.note_disk(1000, 1.0)
    assert not cost.prefers_disk(100)


# ---- the host


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    """A prefix whose blocks had to go is found on the host: its tokens count as cached, and are not computed again."""
    rig = Rig(num_blocks=12, num_slots=64)
    ask(rig, "1")
    rig.run()
    flush(rig)
    before = rig.runner.num_computed
    request = ask(rig, "2")
    rig.run()

    rig.assert_right(request)
    assert cached(rig, "2") == 20
    assert rig.runner.num_computed - before == 4 + 1
    assert rig.tiers.num_loads == 5


def test_what_is_slower_to_copy_is_computed() -> None:
    """Where the cost model prefers to compute, nothing is copied, in either direction."""
    rig = Rig(num_blocks=12, num_slots=64, swap="auto", is_copy_fast=False)
    ask(rig, "1")
    rig.run()
    flush(rig)
    ask(rig, "2")
    rig.run()

    assert (cached(rig, "2"), rig.tiers.num_stores, rig.tiers.num_loads) == (0, 0, 0)


def test_a_step_brings_back_a_bounded_number_of_blocks() -> None:
    """A long prefix comes back over several steps, and who decodes meanwhile gets a token in each of them."""
    rig = Rig(num_blocks=40, num_slots=64)
    ask(rig, "1", 80)
    rig.run()
    flush(rig)
    rig.add("other", prompt(3, 50), None, max_tokens=30, ignore_eos=True)
    rig.step()
    rig.tiers.cost.copy_speed = 3 * 1000 / STEP_COPY_S + 1
    ask(rig, "2", 80)
    steps = 0
    while not rig.outputs["2", 0]:
        assert [event.id for event in rig.step() if event.id == "other"]
        steps += 1

    assert cached(rig, "2") == 76
    assert steps == -(-rig.tiers.num_loads // 3) + 1 > 4
    rig.run()


@pytest.mark.parametrize("when", [0, 1, 2])
def test_whoever_goes_while_blocks_arrive_leaves_nothing_behind(when: int) -> None:
    """Aborted, preempted or paused between two steps that bring its blocks: slots are unpinned, and the next one who
    asks gets all of them."""
    rig = Rig(num_blocks=40, num_slots=64, max_num_seqs=1)
    ask(rig, "1", 80)
    rig.run()
    flush(rig)
    rig.tiers.cost.copy_speed = 3 * 1000 / STEP_COPY_S + 1
    second = ask(rig, "2", 80, priority=2, tokens=9)
    rig.step()
    rig.step()
    if when == 0:
        rig.core.abort("2")
    high = ask(rig, "3", 30 if when == 1 else 130, 60, priority=0)
    rig.run()

    rig.assert_right(high)
    if when:
        rig.assert_right(second)
        assert cached(rig, "2") == 76
    rig.assert_idle()


# ---- swap


@pytest.mark.parametrize(("swap", "how"), [("on", "swap"), ("auto", "swap"), ("off", "recompute")])
def test_a_preempted_sequence_comes_back_by_copy(swap: str, how: str) -> None:
    """Made to give up its blocks by a higher class that needs them all, it goes on where it was and computes only the
    tokens of its last block; with swap off it computes them all again. Its text and cached tokens stay the same."""
    rig = Rig(num_blocks=20, num_slots=64, max_num_seqs=2, swap=swap)  # type: ignore[arg-type]
    low = ask(rig, "low", 29, tokens=20, priority=2)
    for _ in range(6):
        rig.step()
    high = ask(rig, "high", 70, 1, tokens=8, priority=0)
    while "high" in rig.scheduler.requests:
        rig.step()
    before = rig.runner.num_computed
    rig.run()

    rig.assert_right(low)
    rig.assert_right(high)
    assert rig.scheduler.num_preemptions == 1
    assert rig.tiers.resumed == {"swap": 0, "recompute": 0, "kept": 0} | {how: 1}
    assert {chunk.num_cached_tokens for chunk in rig.chunks} == {0}
    assert rig.runner.num_computed - before == (35 - (32 if how == "swap" else 0)) + 13


def test_swap_off_leaves_the_tiers_to_new_requests() -> None:
    """With swap off a prefix still comes back for who asks for the first time."""
    rig = Rig(num_blocks=12, num_slots=64, swap="off")
    ask(rig, "1")
    rig.run()
    flush(rig)
    ask(rig, "2")
    rig.run()

    assert cached(rig, "2") == 20


# ---- the disk


def evicted_to_disk(rig: Rig) -> None:
    """The prefix of family 0 is on the disk alone."""
    ask(rig, "1")
    rig.run()
    flush(rig)
    for _ in range(rig.delay + 1):
        rig.tiers.poll(rig.now)
    forget_host(rig)


def test_a_prefix_comes_back_from_the_disk() -> None:
    """Read into the host while others run, then copied; its tokens count as cached."""
    rig = Rig(num_blocks=12, num_slots=64, num_files=200, delay=3)
    evicted_to_disk(rig)
    rig.add("other", prompt(3, 50), None, max_tokens=20, ignore_eos=True)
    rig.step()
    request = ask(rig, "2")
    while not rig.outputs["2", 0]:
        assert [event.id for event in rig.step() if event.id == "other"], "others wait for the disk"
    rig.run()

    rig.assert_right(request)
    assert cached(rig, "2") == 20
    assert rig.traffic.num_hits == 5


def test_a_burst_of_evictions_reaches_the_disk() -> None:
    """More blocks at once than may be on their way: the others follow, and a whole prefix is found again."""
    rig = Rig(num_blocks=40, num_slots=80, num_files=200, delay=2)
    ask(rig, "1", 100)
    rig.run()
    ask(rig, "flush", 158, 1, 1)
    rig.run()
    assert rig.tiers.num_stores >= 24 > rig.traffic._max_writes
    for _ in range(20):
        rig.tiers.poll(rig.now)
    forget_host(rig)
    ask(rig, "2", 100)
    rig.run()

    assert cached(rig, "2") == 96
    assert rig.traffic.num_hits == 24


@pytest.mark.parametrize("fault", ["broken", "lost"])
def test_what_the_disk_cannot_give_is_computed(fault: str) -> None:
    """Unreadable and vanished files cost time, never a text; they are not asked for twice."""
    rig = Rig(num_blocks=12, num_slots=64, num_files=200)
    evicted_to_disk(rig)
    rig.disk.is_broken = fault == "broken"
    rig.disk.files.clear()
    request = ask(rig, "2")
    rig.run()

    rig.assert_right(request)
    assert cached(rig, "2") == 0
    assert rig.traffic.num_faults >= 5
    rig.disk.is_broken = False
    before = rig.traffic.num_hits
    ask(rig, "3", family=0)
    rig.run()
    assert rig.traffic.num_hits == before


def test_a_disk_that_hangs_is_not_waited_for() -> None:
    """After READ_WAIT_S the request computes what it waited for, and is right; so is what comes later."""
    rig = Rig(num_blocks=12, num_slots=64, num_files=200)
    evicted_to_disk(rig)
    rig.disk.delay = 10_000
    asked, request = rig.now, ask(rig, "2")
    while ("2", 0) not in rig.finished:
        rig.step()

    assert READ_WAIT_S <= rig.now - asked <= READ_WAIT_S + 0.1
    rig.assert_right(request)


def test_a_disk_that_was_too_slow_is_tried_again() -> None:
    """One read in TRIAL_EVERY, of one block: once it is quick, all are read again."""
    rig = Rig(num_blocks=12, num_slots=64, num_files=200, swap="auto")
    evicted_to_disk(rig)
    rig.disk.seconds, rig.tiers.cost.disk_speed = 1e-6, rig.tiers.cost.block_bytes / 10.0
    keys = list(rig.disk.files)[:4]

    def read() -> int:
        """How many blocks it read."""
        before = rig.traffic.num_hits
        rig.traffic.read(keys)
        for _ in range(rig.delay + 1):
            rig.tiers.poll(rig.now)
        forget_host(rig)
        return rig.traffic.num_hits - before

    assert [read() for _ in range(TRIAL_EVERY)] == [0] * (TRIAL_EVERY - 1) + [1]
    seen = [read() for _ in range(100 * TRIAL_EVERY)]
    quick = seen.index(4)
    assert seen[:quick].count(1) == quick // TRIAL_EVERY, "a trial costs one block"
    assert set(seen[quick:]) == {4}


def test_a_disk_that_cannot_write_is_left_alone() -> None:
    """After a write that failed, none is tried for WRITE_PAUSE_S; then again."""
    rig = Rig(num_blocks=12, num_slots=64, num_files=200)
    rig.disk.is_broken = True
    for family in range(6):
        ask(rig, str(family), 30, family)
        rig.run()
    for _ in range(3):
        rig.tiers.poll(rig.now)
    faults = rig.traffic.num_faults
    assert faults
    rig.disk.is_broken = False
    flush(rig)
    assert (rig.traffic.num_writes, rig.traffic.num_faults, rig.disk.files) == (0, faults, {})
    rig.now += WRITE_PAUSE_S
    flush(rig)
    rig.tiers.poll(rig.now)
    assert rig.traffic.num_writes > 0


def test_an_ephemeral_request_never_reaches_the_disk() -> None:
    """Its blocks go to the host and come back for the like of it; never to the disk, nor from there; and a request that
    is not ephemeral finds none of them."""
    rig = Rig(num_blocks=12, num_slots=128, num_files=200)
    ask(rig, "1", ephemeral=True)
    rig.run()
    for family in range(100, 106):
        ask(rig, f"flush{family}", 22, family, ephemeral=True)
        rig.run()
    for _ in range(3):
        rig.tiers.poll(rig.now)
    assert rig.tiers.num_stores > 0
    assert rig.disk.files == {}

    ask(rig, "2", ephemeral=True)
    rig.run()
    ask(rig, "3")
    rig.run()
    assert (cached(rig, "2"), cached(rig, "3")) == (20, 0)


# ---- whose blocks there are

MINE, OTHER = b"m" * 16, b"o" * 16


@pytest.mark.parametrize("num_steps", range(0, 40, 3))
def test_what_an_owner_left_is_nowhere_at_any_moment(num_steps: int) -> None:
    """Forgotten while its blocks are on the device, on their way to the host, to the disk or back: afterwards none is
    found, on no tier and in no file; a running request of it ends right, and its blocks go with the next word. Another
    owner's blocks stay."""
    rig = Rig(num_blocks=12, num_slots=64, num_files=200, delay=3)
    ask(rig, "other", owner=OTHER)
    ask(rig, "1", owner=MINE)
    rig.run()
    flush(rig)
    running = ask(rig, "2", owner=MINE, tokens=9)
    for _ in range(num_steps):
        rig.step()
    rig.core.keep_owners([OTHER, b"\0" * 16])
    rig.run()
    flush(rig)
    for _ in range(2 * rig.delay):
        rig.tiers.poll(rig.now)
    rig.core.keep_owners([OTHER, b"\0" * 16])
    for _ in range(2 * rig.delay):
        rig.tiers.poll(rig.now)
    rig.assert_right(running)
    rig.assert_idle()

    owners = {owner_in(key) for key in (*rig.disk.files, *rig.tiers.host._slot_of, *rig.pool._block_of)}
    assert owners == {OTHER, b"\0" * 16}
    ask(rig, "3", owner=MINE)
    ask(rig, "4", owner=OTHER)
    rig.run()
    assert (cached(rig, "3"), cached(rig, "4")) == (0, 20)


def test_an_owner_has_16_bytes() -> None:
    """Others are refused: a key that is cut elsewhere could be another's."""
    rig = Rig()
    with pytest.raises(Refused, match="16 bytes"):
        ask(rig, "1", owner=b"short")


# ---- random traffic


@dataclass(frozen=True)
class Forget:
    """Blocks of every owner but these are to go."""

    owners: tuple[bytes, ...]


@dataclass(frozen=True)
class Fault:
    is_broken: bool
    loses_files: bool
    delay: int


asks = st.builds(
    Ask, st.integers(1, 40), st.integers(0, 5), st.integers(1, 12), st.integers(0, 2), st.sampled_from([1, 1, 2]),
    st.none(), st.sampled_from([False, False, False, True]), st.sampled_from([MINE, MINE, OTHER]),
)  # fmt: skip
faults = st.builds(Fault, st.booleans(), st.booleans(), st.integers(0, 4))
forgets = st.builds(Forget, st.sampled_from([(), (MINE,), (OTHER,)]))
tales = st.lists(
    st.one_of(asks, asks, asks, asks, st.integers(0, 12), st.integers(0, 12), faults, forgets), min_size=40, max_size=70
)
shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(14, 24), "max_num_seqs": st.integers(1, 5), "num_slots": st.integers(4, 32),
        "num_files": st.sampled_from([20, 200, 200]), "delay": st.integers(0, 3), "swap": st.just("on"),
        "max_batched_tokens": st.sampled_from([7, 32, 1000]), "max_model_len": st.just(56),
    }
)  # fmt: skip


def act(rig: Rig, action: Fault | Forget) -> None:
    if isinstance(action, Forget):
        rig.core.keep_owners(list(action.owners))
        return
    rig.disk.is_broken, rig.disk.delay = action.is_broken, action.delay
    rig.now += 0 if action.is_broken else WRITE_PAUSE_S
    for key in list(rig.disk.files)[:: 3 if action.loses_files else 100]:
        del rig.disk.files[key]


@SETTINGS
@given(shapes, tales, st.sampled_from([2e5 + 1, 6e5 + 1, 1e9]))
def test_tiers_change_no_text(shape: dict[str, object], story: list[object], speed: float) -> None:
    """Random prompts of few families over memories that hold a fraction of them, 1, 3 or any number of blocks brought
    back per step, a slow and broken disk: blocks, slots and bytes are conserved at every step, every text is that of an
    undisturbed run, and the same story has the same chunks again."""
    rig, again = Rig(**shape), Rig(**shape)  # type: ignore[arg-type]
    rig.tiers.cost.copy_speed = again.tiers.cost.copy_speed = speed
    for request in tell(rig, story, partial(act, rig)):
        rig.assert_right(request)
    tell(again, story, partial(act, again))

    assert again.chunks == rig.chunks
    assert again.tiers.resumed == rig.tiers.resumed
