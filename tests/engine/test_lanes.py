"""Lanes: order, fairness, caps and cost."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.lane import Lane
from engine.lanes import DEFERS_PER_LANE, LaneFull, Lanes
from engine.params import SamplingParams
from engine.sequence import Phase, Sequence


class Queue:
    """Lanes with sequences made on the fly."""

    def __init__(self, **options: float) -> None:
        self.lanes = Lanes(**options)  # type: ignore[arg-type]
        self.lane_of: dict[Sequence, Lane] = {}
        self.count = 0

    def arrive(self, name: str, priority: int = 1, weight: float = 1.0, goes_first: bool = False) -> Sequence:
        lane = self.lanes.enter(name, priority, weight)
        self.count += 1
        one = Sequence(
            f"{name}{self.count}", 0, [1], 1, SamplingParams(), 0, lane_name=name, rank=(priority, self.count, 0)
        )
        one.goes_first = goes_first
        self.lane_of[one] = lane
        self.lanes.push(lane, one)
        return one

    def serve(self, num_input: int = 10, num_output: int = 0) -> Sequence | None:
        one = self.lanes.pop()
        if one is not None:
            one.phase = Phase.RUNNING
            self.lanes.charge(self.lane_of[one], num_input, num_output)
            self.lanes.leave(self.lane_of[one])
        return one


def names(queue: Queue, count: int, **cost: int) -> str:
    return "".join(one.request_id[0] for _ in range(count) if (one := queue.serve(**cost)) is not None)


def test_classes_then_turns_then_arrival() -> None:
    """A higher class goes first; inside it, work whose turn has come before; then lanes alternate; each is FIFO."""
    queue = Queue()
    order = [
        queue.arrive("z", 2),
        queue.arrive("a"),
        queue.arrive("a"),
        queue.arrive("b"),
        queue.arrive("r", goes_first=True),
    ]
    order.append(queue.arrive("i", 0))

    served = [one.request_id for _ in order if (one := queue.serve()) is not None]

    assert served == ["i6", "r5", "a2", "b4", "a3", "z1"]
    assert queue.serve() is None


def test_backlogged_lanes_share_equally_whatever_they_send() -> None:
    """A lane with ten times the requests gets no more service than the other."""
    queue = Queue()
    for _ in range(100):
        queue.arrive("a")
    for _ in range(10):
        queue.arrive("b")

    assert names(queue, 20).count("b") == 10


def test_weights_divide_the_service() -> None:
    """Weights 1 : 2 : 4 give service 1 : 2 : 4."""
    queue = Queue()
    for _ in range(100):
        queue.arrive("a", weight=1)
        queue.arrive("b", weight=2)
        queue.arrive("c", weight=4)

    served = names(queue, 70)

    assert [served.count(name) for name in "abc"] == pytest.approx([10, 20, 40], abs=1)


def test_idling_earns_nothing() -> None:
    """A lane that comes back from idle starts where the others are: it can't claim the time that it was away."""
    queue = Queue()
    queue.arrive("b")
    queue.serve()
    for _ in range(100):
        queue.arrive("a")
    names(queue, 50)
    for _ in range(50):
        queue.arrive("b")

    assert names(queue, 20).count("b") == pytest.approx(10, abs=1)


def test_output_is_charged_while_it_is_produced() -> None:
    """A lane whose requests run long is passed by one whose requests run short, at 2 per output token."""
    queue = Queue()
    for _ in range(60):
        queue.arrive("a")
        queue.arrive("b")
    served = {"a": 0, "b": 0}
    for _ in range(60):
        one = queue.lanes.pop()
        assert one is not None
        name = one.request_id[0]
        served[name] += 1
        queue.lanes.charge(queue.lane_of[one], 10, 20 if name == "a" else 0)
        queue.lanes.leave(queue.lane_of[one])

    assert served["b"] == pytest.approx(5 * served["a"], rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_two_backlogged_lanes_stay_close(seed: int) -> None:
    """Service of two lanes that always have work differs by at most 2·max(w_in·L_in, w_out·M) (VTC, theorem 4.4)."""
    queue, rng = Queue(), random.Random(seed)
    service = {"a": 0.0, "b": 0.0}
    for _ in range(600):
        queue.arrive(rng.choice("ab"))
    for name in "ab":
        for _ in range(300):
            queue.arrive(name)
    for _ in range(300):
        num_input, num_output = rng.randint(1, 50), rng.randint(0, 50)
        one = queue.serve(num_input, num_output)
        assert one is not None
        service[one.request_id[0]] += num_input + 2 * num_output
        assert abs(service["a"] - service["b"]) <= 2 * max(50, 2 * 50)


def test_a_full_lane_refuses_and_others_do_not() -> None:
    """The cap is per lane; room comes back with the first admission."""
    queue = Queue(max_waiting_per_lane=2)
    queue.arrive("a")
    queue.arrive("a")
    with pytest.raises(LaneFull):
        queue.arrive("a")
    queue.arrive("b")

    queue.serve()

    queue.arrive("a")


def test_passed_over_sequences_come_back_where_they_were() -> None:
    """A deferred head lets later ones be looked at, a few in its own lane, then those in others, then more of its own,
    and is first again after."""
    queue = Queue()
    arrived = [queue.arrive("a") for _ in range(8)] + [queue.arrive("b")]
    seen = []
    while (one := queue.lanes.pop()) is not None:
        seen.append(one)
        queue.lanes.defer(queue.lane_of[one], one)

    assert seen == [*arrived[:DEFERS_PER_LANE], arrived[-1], *arrived[DEFERS_PER_LANE:-1]]
    queue.lanes.restore()
    assert queue.lanes.pop() is arrived[0]


def test_a_lane_that_was_withheld_is_looked_at_again() -> None:
    """Work whose turn had come before may use up its lane's deferrals; the lane is back in the next round."""
    queue = Queue()
    for _ in range(DEFERS_PER_LANE):
        queue.arrive("a", goes_first=True)
    fresh = queue.arrive("a")
    while (one := queue.lanes.pop()) is not None:
        queue.lanes.defer(queue.lane_of[one], one)
    queue.lanes.restore()

    assert [queue.serve() for _ in range(DEFERS_PER_LANE + 1)][-1] is fresh


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_nothing_is_lost_or_served_twice(data: st.DataObject) -> None:
    """Arrivals, ends while waiting, deferrals: everything else is served exactly once."""
    queue = Queue()
    waiting: list[Sequence] = []
    served: list[Sequence] = []
    for _ in range(data.draw(st.integers(0, 60))):
        match data.draw(st.sampled_from(["arrive", "arrive", "serve", "end", "defer"])):
            case "arrive":
                name, first = data.draw(st.sampled_from("abc")), data.draw(st.booleans())
                waiting.append(queue.arrive(name, data.draw(st.integers(0, 2)), goes_first=first))
            case "serve" if (one := queue.serve()) is not None:
                waiting.remove(one)
                served.append(one)
            case "end" if waiting:
                one = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
                queue.lanes.discard(queue.lane_of[one], one)
                queue.lanes.leave(queue.lane_of[one])
                one.phase = Phase.DONE
            case "defer":
                for _ in range(3):
                    one = queue.lanes.pop()
                    if one is not None:
                        queue.lanes.defer(queue.lane_of[one], one)
                queue.lanes.restore()
        assert queue.lanes.num_waiting == len(waiting)
    rest = []
    while (one := queue.serve()) is not None:
        rest.append(one)
    assert len(rest) == len(waiting)
    assert set(rest) == set(waiting)
    assert not set(rest) & set(served)


def test_idle_lanes_are_forgotten() -> None:
    """A stream of tenants that come once does not grow the memory."""
    queue = Queue()
    for index in range(20_000):
        queue.arrive(f"tenant {index}")
        one = queue.serve()
        assert one is not None
        queue.lane_of.pop(one).num_open -= 1

    assert sum(len(group.lanes) for group in queue.lanes._classes.values()) < 2500


def test_cost_does_not_grow_with_what_waits() -> None:
    """Serving one of 40,000 waiting in 4,000 lanes costs at most a few times what one of 400 in 40 costs."""

    def cost(num_lanes: int) -> float:
        queue = Queue()
        for index in range(num_lanes * 10):
            queue.arrive(f"lane {index % num_lanes}")
        rng = random.Random(1)
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(20):
                queue.serve(rng.randint(1, 100))
            best = min(best, time.perf_counter() - start)
        return best

    small = cost(40)

    assert cost(4000) < 10 * small
