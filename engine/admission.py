"""Admission: which waiting sequence runs next: its turn (Lanes), its adapter (ResidencyCache), its blocks (BlockPool).

Who lacks something is passed over, but not without bound: after so many admissions the others wait for it.

    turn → adapter resident? → blocks free? → running
             │ no: demanded      │ no: passed over at most max_bypass times (work that has run before: never)
             └ parked until it is resident; other adapters may pass max_adapter_bypass times once memory is short
"""

from __future__ import annotations

from adapters.residency import ResidencyCache
from adapters.spec import AdapterError
from engine.block_pool import BlockPool
from engine.demands import Demands
from engine.intake import SchedulerConfig
from engine.lanes import NO_CLASS, Lanes
from engine.preemption import Preemption
from engine.running import Running
from engine.sequence import Phase, Request, Sequence


class Admission:
    """has_news   something has changed since a round of admission came to its end: looking again may help
    num_admitted, num_cached_tokens  ever
    failed        requests whose adapter can't be had, with the reason; the scheduler ends them
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        residency: ResidencyCache,
        lanes: Lanes,
        running: Running,
        requests: dict[str, Request],
    ) -> None:
        self.has_news = False
        self.num_admitted = 0
        self.num_cached_tokens = 0
        self.failed: list[tuple[Request, Exception]] = []
        self.demands = Demands(config, residency, requests)
        self.preemption = Preemption(running, pool, residency, lanes)
        self._config = config
        self._pool = pool
        self._residency = residency
        self._lanes = lanes
        self._running = running
        self._requests = requests
        self._headroom = -(-pool.num_blocks // 100)
        self._blocked: Sequence | None = None
        self._num_passed = 0

    def push(self, sequence: Sequence) -> None:
        """It waits for its turn."""
        self._lanes.push(self._requests[sequence.request_id].lane, sequence)
        self.has_news = True

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended, whatever it waited for."""
        self._lanes.discard(self._requests[sequence.request_id].lane, sequence)
        self._undemand(sequence)

    def absorb(self, now: float) -> None:
        """Takes up what has happened to adapters since the last step; makes room for the first that waits for some."""
        self._take_up(now)
        if self.preemption.make_adapter_room():
            self._take_up(now)

    def lift(self, request: Request) -> None:
        """It waits in the class above from now on."""
        self._lanes.lift(request)
        self._running.sort()
        self.demands.hasten(request)
        self.has_news = True

    def next(self, now: float) -> Sequence | None:
        """The next sequence to run, with its adapter and blocks taken; None when nobody else can run now. When all
        rows are taken, another is paused for it."""
        victim: Sequence | None = None if self._running.has_row else self._running.rows[-1]
        below = NO_CLASS if victim is None else victim.rank[0]
        while self.has_news:
            sequence = self._lanes.pop(below) if self._num_passed < self._config.lookahead else None
            if sequence is None:
                self.has_news = False
                break
            if self._try(sequence, now):
                return self._give_row(sequence, victim)
        return self._next_paused() if victim is None else self._next_fair(now)

    def end_round(self) -> None:
        """Those passed over are back in their places for the next round."""
        self._lanes.restore()
        self._num_passed = 0

    def _take_up(self, now: float) -> None:
        for loaded in self._residency.poll(now):
            if loaded.error is None:
                for sequence in self.demands.arrived(loaded.digest):
                    sequence.goes_first = True  # its turn came when it began to wait
                    self.push(sequence)
            else:
                waiting = self.demands.failed(loaded.digest)
                self.failed.extend((self._requests[one.request_id], loaded.error) for one in waiting)
            self.has_news = True

    def _try(self, sequence: Sequence, now: float) -> bool:
        """Takes adapter and blocks, if it can have them."""
        if sequence.phase is Phase.PAUSED:
            return True
        request = self._requests[sequence.request_id]
        if not self._take_adapter(request, sequence, now):
            self._num_passed += 1
        elif self._take_blocks(request, sequence):
            self._admit(request, sequence, now)
            return True
        else:
            self._pass_over(request, sequence)
        return False

    def _give_row(self, sequence: Sequence, victim: Sequence | None) -> Sequence:
        """`victim` may have given up more than its row in the meantime."""
        if victim is not None and victim.phase is Phase.RUNNING and not self._running.has_row:
            self._running.pause(victim)
            self.has_news = True
        self._running.enter(sequence)
        return sequence

    def _next_paused(self) -> Sequence | None:
        """A row is free, and whoever waits lacks something else: paused ones need nothing but a row."""
        if not self._running.paused:
            return None
        sequence = self._running.paused[0]
        self._lanes.discard(self._running.lane_of(sequence), sequence)
        return self._give_row(sequence, None)

    def _next_fair(self, now: float) -> Sequence | None:
        """In place of a row of a lane that has more than its share, the first of a lane that has less."""
        blocked = self._blocked
        found = self.preemption.unfair_row()
        if found is None or (
            blocked is not None and blocked.phase is Phase.WAITING and blocked.rank[0] <= found[0].priority
        ):
            return None
        lane, victim = found
        sequence = self._lanes.pop_from(lane)
        if sequence is None or not self._try(sequence, now):
            return None
        return self._give_row(sequence, victim)

    def _take_adapter(self, request: Request, sequence: Sequence, now: float) -> bool:
        ref = sequence.adapter
        if ref is None:
            return True
        try:
            is_taken = (
                self.demands.acquire(sequence, ref, now) if self.demands.may_take(ref, sequence.rank[0]) else None
            )
        except AdapterError as error:
            self.failed.append((request, error))
            return False
        if is_taken is None:
            self._lanes.defer(request.lane, sequence)
        return is_taken is True

    def _take_blocks(self, request: Request, sequence: Sequence) -> bool:
        """Blocks for all tokens it has, those of a known prefix shared; for all that it may ever have, if it can't be
        made to give them up any more. Beside others some blocks are left for them to grow, or the newcomer would be
        the first to be preempted."""
        pool = self._pool
        if sequence.need > self._room and not self._make_room(sequence):
            return False
        hits = self._match(request, sequence)
        num_tokens = sequence.num_tokens if sequence.may_yield else max(sequence.num_tokens, sequence.max_len - 1)
        num_new = pool.blocks_for(num_tokens) - len(hits)
        sequence.need = num_new + pool.count_free(hits)
        if sequence.need > self._room:
            if not self._make_room(sequence):
                return False
            hits = self._match(request, sequence)  # what gave way may have been part of it
            num_new = pool.blocks_for(num_tokens) - len(hits)
            if num_new + pool.count_free(hits) > self._room:
                return False
        pool.share(hits)
        sequence.blocks = hits + pool.allocate(num_new)
        sequence.num_computed = len(hits) * pool.block_size
        sequence.num_hashed = len(hits)
        sequence.need = 0
        return True

    @property
    def _room(self) -> int:
        """Blocks that a newcomer may have."""
        return self._pool.num_free - (0 if self._running.is_empty else self._headroom)

    def _make_room(self, sequence: Sequence) -> bool:
        return self.preemption.make_room(sequence, sequence.need - self._room)

    def _match(self, request: Request, sequence: Sequence) -> list[int]:
        """Blocks of the longest known prefix, short of the last token: its logits are needed. None while logprobs of
        the prompt are still to be delivered."""
        if not self._pool.enable_prefix_caching or request.prompt_logprobs is not None:
            return []
        limit = (sequence.num_tokens - 1) // self._pool.block_size
        self._pool.extend(sequence.hashes, sequence.hash_seed, sequence.tokens, limit)
        return self._pool.match(sequence.hashes[:limit])

    def _admit(self, request: Request, sequence: Sequence, now: float) -> None:
        self.num_admitted += 1
        request.blocked_at = None
        if sequence.adapter is not None:
            self.demands.note_admitted(sequence.adapter)
            self._undemand(sequence)
        if request.num_cached is None:
            self._admit_first(request, sequence)
        request.lane.served_at = request.home.served_at = now
        if self._blocked is sequence:
            self._blocked = None

    def _admit_first(self, request: Request, sequence: Sequence) -> None:
        request.num_cached = min(sequence.num_computed, sequence.num_prompt)
        for one in request.sequences:
            one.num_cached = request.num_cached
        self.num_cached_tokens += request.num_cached
        self._lanes.bill(request, sequence.num_prompt - request.num_cached, 0)
        self._lanes.leave(request.home)
        if sequence.adapter is not None:
            self._residency.hold(sequence.adapter.digest)

    def _pass_over(self, request: Request, sequence: Sequence) -> None:
        """Blocks are short for it. Work that has run before is passed by nobody of its class or below."""
        if sequence.adapter is not None:
            self._residency.release(sequence.adapter.digest)
        self._num_passed += 1
        self._lanes.defer(request.lane, sequence)
        if request.blocked_at is None:
            request.blocked_at = self.num_admitted
        if sequence.has_run or self.num_admitted - request.blocked_at >= self._config.max_bypass:
            self.has_news = False
            self._blocked = sequence

    def _undemand(self, sequence: Sequence) -> None:
        if self.demands.withdraw(sequence):
            self.has_news = True
