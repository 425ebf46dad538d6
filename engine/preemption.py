"""Preemption: who gives way when rows, blocks or adapter memory are short. Decides and has Running do it.

    short of   who gives way                                               what it gives up
    a row      the last of a lower class; or, inside a class, the last     its row
               of a lane that has more than its share, for one with less
    blocks     to a newcomer: lower classes. To one that grows: paused     row, blocks and adapter
               ones that rank no higher, else the last of all
    adapters   lower classes                                               row, blocks and adapter

Nobody is made to give up blocks more than MAX_PREEMPTIONS times. That can't lead to a standstill: of those at the limit
only so many run at a time as fit whole, with all that they may ever need, so whoever lacks a block finds one that is
free, or is held by somebody who can give it up.
"""

from __future__ import annotations

from itertools import chain

from adapters.residency import ResidencyCache
from engine.block_pool import BlockPool
from engine.lane import Lane
from engine.lanes import Lanes
from engine.running import Running
from engine.sequence import Phase, Sequence


class Preemption:
    """Costs at most a look at every row, and only when something is short."""

    def __init__(self, running: Running, pool: BlockPool, residency: ResidencyCache, lanes: Lanes) -> None:
        self._running = running
        self._pool = pool
        self._residency = residency
        self._lanes = lanes
        self._next_to_stay: Sequence | None = None

    def unfair_row(self) -> tuple[Lane, Sequence] | None:
        """(a lane that waits, a row of another that has more than its share). Only among the lowest class that runs,
        and only if the row's lane has had at least as much service and keeps, by weight, at least as many rows."""
        rows = self._running.rows
        priority = rows[-1].rank[0]
        lane = self._lanes.least_served(priority)
        if lane is None:
            return None
        most = (lane.num_running + 1) / lane.weight
        lane_of = self._running.lane_of
        found = None
        for sequence in reversed(rows):
            if sequence.rank[0] != priority:
                break
            other = lane_of(sequence)
            if other.num_running == 1 or other is lane or other.counter < lane.counter:
                continue
            left = (other.num_running - 1) / other.weight
            if left > most or (found is None and left == most):
                most, found = left, sequence
        return None if found is None else (lane, found)

    def grow(self, sequence: Sequence) -> bool:
        """Frees a block for a running sequence. False: it was the one to give way itself."""
        while self._pool.num_free == 0:
            victim = self._weakest(sequence)
            self._running.strip(victim, "blocks")
            if victim is sequence:
                return False
        return True

    def may_stay(self, sequence: Sequence) -> bool:
        """It can be made to give up blocks; or all those that can't, it too, would find room at their longest. Who has
        to wait for that is passed by nobody of its class or below that could not give way either."""
        first = self._next_to_stay
        if sequence.may_yield:
            return True
        if first and first is not sequence and first.phase is Phase.WAITING and first.rank[0] <= sequence.rank[0]:
            return False
        staying = [one for one in self._holders() if not one.may_yield]
        fits = sum(map(self._most_blocks, [*staying, sequence])) <= self._pool.num_blocks
        if not fits:
            self._next_to_stay = sequence
        elif first is sequence:
            self._next_to_stay = None
        return fits

    def make_room(self, sequence: Sequence, num_short: int) -> bool:
        """Frees that many more blocks for a waiting sequence if lower classes have them; else touches nobody."""
        victims = self._lower(sequence.rank[0])
        if sum(len(one.blocks) for one in victims) < num_short:
            return False
        goal = self._pool.num_free + num_short
        for victim in victims:
            if self._pool.num_free >= goal:
                break
            self._running.strip(victim, "blocks")
        return self._pool.num_free >= goal

    def make_adapter_room(self) -> bool:
        """Unpins adapters of lower classes until the first that waits for adapter memory fits, if they have enough."""
        shortage = self._residency.shortage
        if shortage is None:
            return False
        num_short = self._residency.shortage_bytes
        users: dict[str, list[Sequence]] = {}
        kept = {one.adapter.digest for one in self._holders() if one.adapter and not _is_lower(one, shortage[0])}
        for one in self._lower(shortage[0]):
            if one.adapter is not None and one.adapter.digest not in kept:
                users.setdefault(one.adapter.digest, []).append(one)
        sizes = {digest: self._residency.unpinned_bytes(digest, len(ones)) for digest, ones in users.items()}
        if sum(sizes.values()) < num_short:
            return False
        for digest, ones in users.items():
            if num_short <= 0:
                break
            if sizes[digest]:
                num_short -= sizes[digest]
                for one in ones:
                    self._running.strip(one, "adapter")
        return True

    def _weakest(self, sequence: Sequence) -> Sequence:
        """Who gives way to this one's growth; itself, if nobody else can."""
        paused = [one for one in reversed(self._running.paused) if one.may_yield]
        first = [one for one in paused if one.rank[0] >= sequence.rank[0]]
        rows = (one for one in reversed(self._running.rows) if one.may_yield)
        return next(chain(first, rows, paused))

    def _most_blocks(self, sequence: Sequence) -> int:
        return self._pool.blocks_for(max(sequence.num_tokens, sequence.max_len - 1))

    def _lower(self, priority: int) -> list[Sequence]:
        """Those of lower classes that can be made to give up their blocks: the lowest class first, in it paused ones,
        then the last by rank."""
        lower = [one for one in self._holders() if _is_lower(one, priority)]
        lower.sort(key=lambda one: (one.rank[0], one.phase is Phase.PAUSED, one.rank), reverse=True)
        return lower

    def _holders(self) -> list[Sequence]:
        return self._running.rows + self._running.paused


def _is_lower(sequence: Sequence, priority: int) -> bool:
    return sequence.rank[0] > priority and sequence.may_yield
