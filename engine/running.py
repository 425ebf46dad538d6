"""Running: the sequences that hold blocks and adapter, with a row or paused for want of one. What they give up, they
give up here. Knows no policy."""

from __future__ import annotations

from bisect import insort

from adapters.residency import ResidencyCache
from engine.block_pool import BlockPool
from engine.kv_tiers import KVTiers
from engine.lane import Lane
from engine.lanes import Lanes
from engine.sequence import Phase, Request, Sequence
from engine.step import Draft


class Running:
    """rows, paused   by rank
    stripped          those that gave up their blocks and have not got new ones yet
    num_recomputes    blocks given up, to be computed again: by cause, "blocks" or "adapter"
    num_pauses        rows given up
    draft             the step under construction: who gives up its row is not in it
    """

    def __init__(
        self,
        max_rows: int,
        pool: BlockPool,
        residency: ResidencyCache,
        lanes: Lanes,
        requests: dict[str, Request],
        tiers: KVTiers,
    ) -> None:
        self.rows: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.stripped: set[Sequence] = set()
        self.num_recomputes = {"blocks": 0, "adapter": 0}
        self.num_pauses = 0
        self.draft = Draft(0)
        self._max_rows = max_rows
        self._pool = pool
        self._residency = residency
        self._lanes = lanes
        self._requests = requests
        self._tiers = tiers
        self._turn = 0

    @property
    def num_stripped(self) -> int:
        """Times that a sequence gave up everything, ever."""
        return sum(self.num_recomputes.values())

    @property
    def has_row(self) -> bool:
        """One more could run."""
        return len(self.rows) < self._max_rows

    @property
    def last(self) -> Sequence | None:
        """The one whose row goes to another when all rows are taken; None while one is free."""
        return None if self.has_row else self.rows[-1]

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.paused

    def lane_of(self, sequence: Sequence) -> Lane:
        return self._requests[sequence.request_id].lane

    def enter(self, sequence: Sequence, is_fork: bool = False) -> None:
        """It has blocks and adapter (a fork, its leader's), and gets a row."""
        if is_fork and sequence.adapter is not None:
            self._residency.pin(sequence.adapter.digest)
        if sequence.phase is Phase.PAUSED:
            self.paused.remove(sequence)
        sequence.phase = Phase.RUNNING
        sequence.has_run = sequence.goes_first = True
        insort(self.rows, sequence, key=_rank)
        self.lane_of(sequence).num_running += 1

    def pause(self, sequence: Sequence) -> None:
        """Gives up its row alone, and waits for the next before all newer work of its class."""
        self.num_pauses += 1
        self._leave_row(sequence)
        sequence.phase = Phase.PAUSED
        insort(self.paused, sequence, key=_rank)
        self._lanes.push(self.lane_of(sequence), sequence)

    def strip(self, sequence: Sequence, cause: str) -> None:
        """Gives up everything; its tokens stay, and it waits before all newer work of its class."""
        self.num_recomputes[cause] += 1
        sequence.num_preempted += 1
        self.stripped.add(sequence)
        sequence.read_until = None
        self._leave(sequence)
        sequence.phase = Phase.WAITING
        if not sequence.is_queued:
            self._lanes.push(self.lane_of(sequence), sequence)

    def end(self, sequence: Sequence) -> None:
        """It has ended, and holds nothing any more."""
        self._leave(sequence)
        self._lanes.discard(self.lane_of(sequence), sequence)
        sequence.phase = Phase.DONE

    def sort(self) -> None:
        """Ranks have changed."""
        self.rows.sort(key=_rank)
        self.paused.sort(key=_rank)

    def order(self, max_tokens: int) -> list[Sequence]:
        """Decoding sequences first, then prompts, each by rank; by turns when a step has no token for each."""
        rows = self.rows
        if any(one.is_arriving for one in rows):
            rows = [one for one in rows if not one.is_arriving]
        if len(rows) > max_tokens:
            first = self._turn % len(rows)
            self._turn += max_tokens
            return rows[first:] + rows[:first]
        order = [one for one in rows if len(one.tokens) - one.num_computed == 1]
        if len(order) < len(rows):
            order += [one for one in rows if len(one.tokens) - one.num_computed > 1]
        return order

    def _leave(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.RUNNING:
            self._leave_row(sequence)
        else:
            self.paused.remove(sequence)
        self._tiers.cancel(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        if sequence.adapter is not None:
            self._residency.release(sequence.adapter.digest)

    def _leave_row(self, sequence: Sequence) -> None:
        self.rows.remove(sequence)
        self.lane_of(sequence).num_running -= 1
        self.draft.drop(sequence)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
