"""Who gives way when rows, blocks or adapter memory are short; ageing; fair shares of rows."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sequence import MAX_PREEMPTIONS, Phase, Sequence
from tests.engine.rig import ADAPTER_BYTES, Rig, adapter, prompt


def first(rig: Rig, id: str) -> Sequence:
    return rig.scheduler.requests[id].sequences[0]


def fill(rig: Rig, count: int, length: int = 8, **more: object) -> None:
    for index in range(count):
        rig.add(f"low{index}", prompt(length, index), ignore_eos=True, max_tokens=40, **more)
    rig.step()
    rig.step()


def test_a_higher_class_takes_a_row_and_the_row_alone() -> None:
    """All rows taken: the higher class runs in the next step; the last of the lowest class is paused, keeps its blocks,
    computes nothing twice, and goes on before newer work of its class."""
    rig = Rig(max_num_seqs=3)
    fill(rig, 3, priority=1)
    rig.add("new", prompt(4, 9), None, max_tokens=2)
    rig.add("high", prompt(4, 8), None, priority=0, max_tokens=6, ignore_eos=True)
    rig.step()

    assert "high" in rig.first_step
    assert first(rig, "low2").phase is Phase.PAUSED
    while "high" in rig.scheduler.requests:
        rig.step()
    rig.step()
    assert first(rig, "low2").phase is Phase.RUNNING
    assert "new" not in rig.first_step
    rig.run()
    assert rig.scheduler.num_preemptions == 0
    assert rig.scheduler.holding.num_pauses == 1
    assert rig.runner.num_computed == 3 * (8 + 39) + (4 + 5) + (4 + 1)


def test_a_pause_is_no_preemption() -> None:
    """Paused for its row more often than anybody may be preempted, a sequence can still be made to give up its blocks:
    a pause does not count. Meanwhile it is told as paused, then as swapped, then as neither."""
    rig = Rig(num_blocks=20, max_num_seqs=1)
    low = rig.add("low", prompt(20), None, priority=2, max_tokens=30, ignore_eos=True)
    rig.step()
    for index in range(MAX_PREEMPTIONS + 2):
        rig.add(f"high{index}", prompt(4, index), None, priority=0, max_tokens=2, ignore_eos=True)
        rig.step()
        assert rig.core.stats("").classes[2].paused == 1
        while f"high{index}" in rig.scheduler.requests:
            rig.step()
        rig.step()
    assert rig.scheduler.holding.num_pauses == MAX_PREEMPTIONS + 2
    assert (first(rig, "low").num_preempted, first(rig, "low").may_yield) == (0, True)

    rig.add("large", prompt(60, 9), None, priority=0, max_tokens=4, ignore_eos=True)
    rig.step()
    assert rig.scheduler.num_preemptions == 1
    told = rig.core.stats("").classes[2]
    assert (told.paused, told.waiting_row + told.waiting_blocks, told.swapped) == (0, 1, 1)
    rig.run()
    rig.assert_right(low)
    assert rig.core.stats("").classes[2].swapped == 0


def test_who_ends_while_it_is_swapped_is_told_no_more() -> None:
    """Aborted after it gave up its blocks."""
    rig = Rig(num_blocks=20, max_num_seqs=2)
    rig.add("low", prompt(30), None, priority=2, max_tokens=30, ignore_eos=True)
    rig.step()
    rig.add("large", prompt(60, 9), None, priority=0, max_tokens=4, ignore_eos=True)
    rig.step()
    assert rig.core.stats("").classes[2].swapped == 1
    rig.core.abort("low")

    assert rig.core.stats("").classes[2].swapped == 0
    rig.run()
    rig.assert_idle()


def test_kv09_a_higher_class_takes_blocks() -> None:
    """KV-09: five running, with adapters and without; one of the highest class needs most of the memory: it starts
    next, others give up their blocks, the last first, and end with their own text."""
    rig = Rig(num_blocks=40, max_num_seqs=8)
    low = [
        rig.add(f"low{i}", prompt(20, i), adapter(i) if i % 2 else None, priority=1, max_tokens=16, ignore_eos=True)
        for i in range(5)
    ]
    for _ in range(5):
        rig.step()
    high = rig.add("high", prompt(100, 7), adapter(1), priority=0, max_tokens=8, ignore_eos=True)
    rig.step()
    rig.step()

    assert "high" in rig.first_step
    assert first(rig, "low4").phase is Phase.WAITING
    assert first(rig, "low0").phase is Phase.RUNNING
    rig.run()
    for request in [*low, high]:
        rig.assert_right(request)


def test_nobody_is_touched_in_vain() -> None:
    """A higher class that would not fit even without the lower ones preempts nobody."""
    rig = Rig(num_blocks=40, max_num_seqs=8)
    rig.add("peer", prompt(60, 1), None, priority=0, max_tokens=30, ignore_eos=True)
    fill(rig, 3, priority=1)
    rig.add("high", prompt(120, 2), None, priority=0, max_tokens=4)
    rig.step()

    assert rig.scheduler.num_preemptions == 0
    rig.run()
    assert "high" in rig.first_step


def test_a_higher_class_takes_adapter_memory() -> None:
    """Adapter memory full of running lower classes: a higher one gets it, and no more is freed than it needs."""
    rig = Rig(slots=2, max_num_seqs=8, num_blocks=200)
    low = [rig.add(f"low{i}", prompt(8, i), adapter(i), max_tokens=60, ignore_eos=True) for i in range(2)]
    for _ in range(5):
        rig.step()
    high = rig.add("high", prompt(8, 8), adapter(9), priority=0, max_tokens=4, ignore_eos=True)
    for _ in range(5):
        rig.step()

    assert "high" in rig.first_step
    assert rig.scheduler.holding.num_recomputes == {"blocks": 0, "adapter": 1}
    assert first(rig, "low0").phase is Phase.RUNNING
    rig.run()
    for request in [*low, high]:
        rig.assert_right(request)


def test_adapter_memory_of_equals_is_theirs() -> None:
    """Inside a class nobody loses its adapter."""
    rig = Rig(slots=1)
    rig.add("1", prompt(8), adapter(1), max_tokens=30, ignore_eos=True)
    for _ in range(4):
        rig.step()
    rig.add("2", prompt(8), adapter(2), max_tokens=4)
    rig.run()

    assert rig.scheduler.num_preemptions == 0


@pytest.mark.parametrize("slots", [1, 4])
def test_sc12_work_is_not_redone_for_ever(slots: int) -> None:
    """SC-12: under a steady stream of higher classes that takes all blocks each time, a request gives up its blocks
    three times; then it keeps them, and ends."""
    rig = Rig(num_blocks=16, max_num_seqs=4, slots=slots)
    request = rig.add("low", prompt(20), adapter(1), priority=2, max_tokens=24, ignore_eos=True)
    for _ in range(4):
        rig.step()
    counts = set()
    for index in range(400):
        if "low" not in rig.scheduler.requests:
            break
        counts.add(first(rig, "low").num_preempted)
        if index % 8 == 0:
            rig.add(f"high{index}", prompt(50, index), None, priority=0, max_tokens=4, ignore_eos=True)
        rig.step()

    assert counts == {0, 1, 2, 3} == set(range(MAX_PREEMPTIONS + 1))
    rig.assert_right(request)
    rig.run()


@pytest.mark.parametrize("load", [10, 100])
def test_a_light_lane_gets_a_row_of_a_heavy_one(load: int) -> None:
    """All rows taken by one lane with 10 or 100 times the rows waiting: another's single requests have their first
    token in the next step, and the heavy lane's paused work goes on and computes nothing twice."""
    rig = Rig(num_blocks=800, max_num_seqs=8)
    for index in range(8 * load):
        rig.add(f"heavy{index}", prompt(16, index), None, lane="heavy", max_tokens=50, ignore_eos=True)
    for _ in range(10):
        rig.step()
    for index in range(20):
        arrived = rig.num_steps
        rig.add(f"light{index}", prompt(8, 900 + index), None, lane="light", max_tokens=4, ignore_eos=True)
        while f"light{index}" in rig.scheduler.requests:
            rig.step()
        assert rig.first_step[f"light{index}"] - arrived == 1

    assert rig.scheduler.num_preemptions == 0
    assert len(rig.scheduler.holding.paused) <= 1


def test_rows_follow_the_weights() -> None:
    """Lanes that want all rows end up with rows by their weights, and then leave each other alone."""
    rig = Rig(num_blocks=2000, max_num_seqs=7)
    for lane, weight in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
        for index in range(20):
            rig.add(f"{lane}{index}", prompt(4, index), None, lane=lane, weight=weight, max_tokens=200, ignore_eos=True)
        rig.step()
    for _ in range(20):
        rig.step()
    rows = {lane.name: lane.num_running for lane in rig.lanes}
    pauses = rig.scheduler.holding.num_pauses
    for _ in range(100):
        rig.step()

    assert abs(rows["a"] - 1) <= 1
    assert abs(rows["b"] - 2) <= 1
    assert abs(rows["c"] - 4) <= 1
    assert rig.scheduler.holding.num_pauses == pauses


# ---- ageing


def flood(rig: Rig, steps: int, lane: str = "flood") -> None:
    """All rows are always taken by the highest class."""
    for _ in range(steps):
        while sum(r.message.priority == 0 for r in rig.scheduler.requests.values()) < 2 * rig.max_num_seqs:
            id = f"flood{len(rig.outputs)}"
            rig.add(id, prompt(4, len(rig.outputs)), None, lane=lane, priority=0, max_tokens=5, ignore_eos=True)
        rig.step()


def test_a_starved_request_is_lifted_and_stays_so() -> None:
    """Under a flood of the highest class one of the lowest class waits twice the ageing time, a class each, then takes
    part in its fair share, and is not preempted by class again."""
    rig = Rig(max_num_seqs=2, num_blocks=200, options={"ageing_s": 0.5})
    flood(rig, 10)
    rig.add("low", prompt(8), None, lane="low", priority=2, max_tokens=30, ignore_eos=True)
    flood(rig, 95)
    assert "low" not in rig.first_step
    while "low" not in rig.first_step:
        flood(rig, 1)
    assert rig.num_steps <= 130
    assert first(rig, "low").rank[0] == 0
    flood(rig, 60)
    assert ("low", 0) in rig.finished
    assert rig.scheduler.num_preemptions == 0


def test_a_backlog_does_not_age_as_a_whole() -> None:
    """Of a lane that floods its own class nothing is lifted while it is served; starved from above, one at a time."""
    rig = Rig(max_num_seqs=2, num_blocks=200, options={"ageing_s": 0.3})
    for index in range(60):
        rig.add(f"low{index}", prompt(4, index), None, lane="low", max_tokens=10, ignore_eos=True)
    for _ in range(200):
        rig.step()
    assert all(request.lane is request.home for request in rig.scheduler.requests.values())

    flood(rig, 120)
    lifted = [request for request in rig.scheduler.requests.values() if request.lane is not request.home]
    assert len(lifted) <= 4


def test_who_is_ahead_of_its_share_does_not_age() -> None:
    """Of two lanes that a flood of the highest class keeps waiting, the one that has had more service than the other is
    not lifted; it is once the other has caught up."""
    rig = Rig(max_num_seqs=2, num_blocks=200, options={"ageing_s": 0.3})
    rig.lanes.slack = 10
    flood(rig, 5)
    for name in ("greedy", "modest"):
        rig.add(name, prompt(8), None, lane=name, priority=2, max_tokens=4, ignore_eos=True)
        rig.add(f"{name}2", prompt(8), None, lane=name, priority=2, max_tokens=4, ignore_eos=True)
    (greedy,) = [lane for lane in rig.lanes if (lane.name, lane.priority) == ("greedy", 2)]
    greedy.counter += 1000
    flood(rig, 50)

    def rank(id: str) -> int:
        return rig.scheduler.requests[id].lane.priority

    assert (rank("greedy"), rank("modest")) == (2, 1)
    greedy.counter -= 1000
    before = rig.num_steps
    while rank("greedy") == 2:
        flood(rig, 1)
    assert rig.num_steps - before <= 2 * 30 + 1


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 30), st.booleans(), st.integers(14, 60),
    st.sampled_from([0, 30]),
)  # fmt: skip
def test_nobody_waits_longer_than_the_bound(
    priority: int, rows: int, others: int, length: int, has_adapter: bool, num_blocks: int, num_slots: int
) -> None:
    """Whatever else is sent in whatever class, with blocks that go to the host and come back or without: the first of a
    lane is admitted within twice the ageing time for each class above it, and then the time that each other lane needs
    for `max_bypass` of its requests."""
    ageing_s = 0.2
    options = {"ageing_s": ageing_s, "max_bypass": 4}
    rig = Rig(max_num_seqs=rows, num_blocks=num_blocks, slots=1, num_slots=num_slots, options=options)
    arrived = None
    for index in range(1200):
        for lane in range(others):
            if sum(r.message.lane == str(lane) for r in rig.scheduler.requests.values()) < rows + 2:
                id, ref = f"{lane}.{index}", adapter(lane + 2) if lane % 2 else None
                rig.add(id, prompt(6, index), ref, lane=str(lane), priority=lane % 2, max_tokens=6, ignore_eos=True)
        rig.step()
        if index == 20:
            arrived, ref = rig.now, adapter(1) if has_adapter else None
            rig.add("one", prompt(length, 7), ref, lane="one", priority=priority, max_tokens=4, ignore_eos=True)
        if "one" in rig.first_step:
            break
    bound = 2 * ageing_s * priority + 0.01 * others * (4 + rows) * 2 * 12
    assert arrived is not None
    assert rig.now - arrived <= bound


# ---- what is charged


def test_a_lane_pays_for_the_adapters_read_for_it() -> None:
    """Reading an adapter counts as service of the lane that asked for it first, once."""
    rig = Rig(options={"adapter_cost_per_mib": float(1 << 20)})
    rig.add("1", prompt(5), adapter(1), lane="a", max_tokens=1)
    rig.add("2", prompt(5, 1), adapter(1), lane="b", max_tokens=1)
    rig.run()
    service = {lane.name: lane.service for lane in rig.lanes}

    assert service == {"a": ADAPTER_BYTES + 5 + 2, "b": 5 + 2}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_backlogged_lanes_stay_within_the_bound(data: st.DataObject) -> None:
    """Two lanes that always have work, of random shape and weight, on few rows and blocks: their service by weight
    differs by at most 2·max(w_in·L_in, w_out·M), M the tokens of a full batch, plus what `max_bypass` admissions may
    take ahead of their turn."""
    rows, weight = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1.0, 2.0]))
    shape = {lane: (data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24))) for lane in "ab"}
    rig = Rig(num_blocks=data.draw(st.integers(14, 80)), max_num_seqs=rows, prefix=False, options={"max_bypass": 4})
    longest = max(length for length, _ in shape.values())
    batch = rows * max(sum(one) for one in shape.values())
    for index in range(300):
        for lane, (length, output) in shape.items():
            if sum(r.message.lane == lane for r in rig.scheduler.requests.values()) < rows + 6:
                id, own = f"{lane}{index}", 1.0 if lane == "a" else weight
                rig.add(id, prompt(length, index), None, lane=lane, weight=own, max_tokens=output, ignore_eos=True)
        rig.step()
    counters = [lane.counter for lane in rig.lanes]

    assert abs(counters[0] - counters[1]) <= 2 * max(longest, 2 * batch) + 4 * (longest + 2 * batch / rows)
