"""KV memory is used: no sequence holds more than it needs, and nobody waits or gives way while there is enough."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sequence import Phase, Request, Sequence
from engine.step import Step
from tests.engine.rig import Rig
from tests.engine.stories import Ask, tell

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


class Watch:
    """Looks at every decision of a rig's scheduler."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._schedule, rig.scheduler.schedule = rig.scheduler.schedule, self.schedule  # type: ignore[method-assign]
        preemption = rig.scheduler.admission.preemption
        self._make_room, preemption.make_room = preemption.make_room, self.make_room  # type: ignore[method-assign]
        self._grow, preemption.grow = preemption.grow, self.grow  # type: ignore[method-assign]

    @property
    def has_enough(self) -> bool:
        return self.rig.pool.num_free * 25 > self.rig.num_blocks

    def schedule(self, now: float) -> Step | None:
        step = self._schedule(now)
        for request in self.rig.scheduler.requests.values():
            for sequence in request.sequences:
                if sequence.phase in (Phase.RUNNING, Phase.PAUSED):
                    empty = len(sequence.blocks) * self.rig.block_size - sequence.num_tokens
                    assert empty < self.rig.block_size, "empty slots"
        if self.has_enough and self.looked_at_all(step):
            for request in self.rig.scheduler.requests.values():
                assert not self.waits_in_vain(request), "waits for want of blocks that are there"
        return step

    def looked_at_all(self, step: Step | None) -> bool:
        """There are rows and tokens left, and nobody's blocks are being gathered."""
        scheduler, rig = self.rig.scheduler, self.rig
        num_tokens = 0 if step is None else step.num_tokens
        return (
            scheduler.holding.has_row
            and rig.lanes.num_waiting <= scheduler._config.lookahead
            and num_tokens < rig.max_batched_tokens
            and scheduler.admission.gathers_for is None
        )

    def waits_in_vain(self, request: Request) -> bool:
        sequence = request.leader
        if sequence.phase is not Phase.WAITING or not sequence.is_queued or not sequence.may_yield:
            return False
        if sequence.adapter is not None:
            return False
        return self.need(request, sequence) <= self.rig.pool.num_free

    def need(self, request: Request, sequence: Sequence) -> int:
        hits = self.rig.scheduler.admission._match(request, sequence)[0]
        return self.rig.pool.blocks_for(sequence.num_tokens) - len(hits) + self.rig.pool.count_free(hits)

    def make_room(self, sequence: Sequence, num_short: int) -> bool:
        before, has_enough, num_free = self.rig.scheduler.num_preemptions, self.has_enough, self.rig.pool.num_free
        is_made = self._make_room(sequence, num_short)
        if self.rig.scheduler.num_preemptions > before:
            assert not has_enough or sequence.need > num_free, "preempts while there is enough"
        return is_made

    def grow(self, sequence: Sequence) -> bool:
        before, num_free = self.rig.scheduler.num_preemptions, self.rig.pool.num_free
        is_given = self._grow(sequence)
        assert num_free == 0 or self.rig.scheduler.num_preemptions == before, "preempts while a block is free"
        return is_given


asks = st.builds(
    Ask, st.integers(1, 60), st.integers(0, 4), st.integers(1, 40), st.sampled_from([0, 1, 1, 1, 2]),
    st.sampled_from([1, 1, 1, 2, 3]), st.sampled_from([None, None, None, 1, 2]),
)  # fmt: skip
stories = st.lists(st.one_of(asks, asks, st.integers(0, 20)), min_size=20, max_size=50)
shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(26, 120), "max_num_seqs": st.integers(2, 16), "slots": st.integers(1, 3),
        "block_size": st.sampled_from([4, 16]), "prefix": st.booleans(), "max_model_len": st.just(104),
        "num_slots": st.sampled_from([0, 30]), "max_batched_tokens": st.sampled_from([32, 200, 1000]),
    }
)  # fmt: skip


@SETTINGS
@given(shapes, stories)
def test_blocks_are_neither_hoarded_nor_left_lying(shape: dict[str, object], story: list[object]) -> None:
    """At every step, of random traffic on memories for a few requests: a sequence that holds blocks has fewer empty
    slots than a block; nobody waits for blocks while more than 4 % are free and enough for all its tokens, unless they
    are gathered for one that was passed by often enough, or ran before; and nobody gives up blocks while one is free
    for who grows, or more than 4 % and enough for who comes."""
    rig = Rig(**shape)  # type: ignore[arg-type]
    Watch(rig)
    for request in tell(rig, story):
        rig.assert_right(request)
