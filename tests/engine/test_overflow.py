"""AL-16: an adapter whose values overflow inside the model ends its own request and nothing else."""

from __future__ import annotations

from engine.step import Row, Sampled
from tests.engine.rig import MemoryRunner, Rig, adapter


class Overflowing(MemoryRunner):
    """From the fifth token on, the rows of `digest` have no finite logits."""

    digest = ""

    def sample(self, row: Row) -> Sampled:
        ref = row.sequence.adapter
        if row.samples and ref is not None and ref.digest == self.digest and row.sequence.num_output >= 4:
            return Sampled(None)
        return super().sample(row)


def test_an_overflowing_row_fails_alone() -> None:
    """Its request (all choices of it) fails with engine_error after the tokens it has; its blocks and its adapter are
    free again; the other requests, on another adapter and on the base, are what they would have been."""
    rig = Rig()
    bad, good = adapter(1), adapter(2)
    rig.runner = Overflowing(rig.num_blocks, rig.block_size, rig.bank, rig.num_slots)
    rig.runner.digest = bad.digest
    rig.core._runner = rig.runner
    rig.add("bad", [5, 6, 7], bad, max_tokens=20, n=2, ignore_eos=True)
    others = [
        rig.add("good", [5, 6, 7], good, max_tokens=20, ignore_eos=True),
        rig.add("base", [5, 6, 7], max_tokens=20, ignore_eos=True),
    ]

    rig.run()

    assert rig.failed["bad"].code == "engine_error"
    assert len(rig.outputs["bad", 0]) == 4
    for request in others:
        rig.assert_right(request)
    stats = rig.core.stats("boot")
    assert stats.blocks_used == 0
    assert all(state.num_pins == 0 for state in stats.adapters)
