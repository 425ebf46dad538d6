"""Admission: which waiting sequence runs next: its turn (Lanes), its adapter (ResidencyCache), its blocks (BlockPool).

Who lacks something is passed over, but not without bound: after so many admissions the others wait for it.

    turn → adapter resident? → prefix on the disk? → blocks free? → running
             │ no: demanded      │ yes: passed over    │ no: passed over at most max_bypass times (work that has run
             │                   └ while it is read    └ before: never)
             └ parked until it is resident; other adapters may pass max_adapter_bypass times once memory is short
"""

from __future__ import annotations

from adapters.residency import ResidencyCache
from adapters.spec import AdapterError
from engine.block_pool import BlockPool
from engine.demands import Demands
from engine.intake import SchedulerConfig
from engine.kv_tiers import KVTiers
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
        tiers: KVTiers,
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
        self._tiers = tiers
        self._spare = pool.num_blocks // 25
        self._headroom = min(self._spare, -(-pool.num_blocks // 100))
        self.gathers_for: Sequence | None = None
        self._num_passed = 0
        self._num_stripped = 0

    def push(self, sequence: Sequence) -> None:
        """It waits for its turn."""
        self._lanes.push(self._requests[sequence.request_id].lane, sequence)
        self.has_news = True

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended, whatever it waited for."""
        self._lanes.discard(self._requests[sequence.request_id].lane, sequence)
        self._undemand(sequence)
        self._running.stripped.discard(sequence)
        if self.gathers_for is sequence:
            self.gathers_for = None

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
        if self._running.num_stripped > self._num_stripped:
            self._num_stripped = self._running.num_stripped
            self.has_news = True  # whoever gave way may have given more than was needed
        while self.has_news:
            victim = self._running.last
            below = NO_CLASS if victim is None else victim.rank[0]
            sequence = self._lanes.pop(below) if self._num_passed < self._config.lookahead else None
            if sequence is None:
                self.has_news = False
                break
            if self._try(sequence, now):
                return self._give_row(sequence, victim)
        return self._next_paused() if self._running.has_row else self._next_fair(now)

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
        elif self._awaits_disk(request, sequence, now) or not self.preemption.may_stay(sequence):
            self._skip(request, sequence)
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
        blocked = self.gathers_for
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
        """Blocks for all tokens it has, those of a known prefix shared. When few are left, some are kept for others to
        grow, or the newcomer would be the first to be preempted."""
        pool = self._pool
        hits, rest = self._match(request, sequence)
        num_blocks = pool.blocks_for(sequence.num_tokens)
        num_new = num_blocks - len(hits)
        sequence.need = num_new + pool.count_free(hits)
        if sequence.need > self._room:
            if not self._make_room(sequence):
                return False
            hits, rest = self._match(request, sequence)  # what gave way may have been part of it
            num_new = num_blocks - len(hits)
            if num_new + pool.count_free(hits) > self._room:
                return False
        self._give_blocks(sequence, hits, rest, num_new)
        return True

    def _give_blocks(self, sequence: Sequence, hits: list[int], rest: list[bytes], num_new: int) -> None:
        """Blocks that the device knows, then such as the host gives back, then new ones."""
        pool = self._pool
        slots = self._tiers.claim(sequence, rest)
        pool.share(hits)
        sequence.blocks = hits + pool.allocate(num_new)
        num_known = len(hits) + len(slots)
        self._tiers.bring(sequence, slots, sequence.blocks[len(hits) : num_known])
        if sequence in self._running.stripped:
            self._running.stripped.discard(sequence)
            self._tiers.note_resumed(len(slots), (sequence.num_tokens - 1) // pool.block_size - num_known)
        sequence.num_computed = num_known * pool.block_size
        sequence.num_hashed = len(hits)
        sequence.read_until = None
        sequence.need = 0

    @property
    def _room(self) -> int:
        """Blocks that a newcomer may have: all; of the last 4 %, if others run, all but the headroom."""
        num_free = self._pool.num_free
        is_short = num_free <= self._spare and not self._running.is_empty
        return num_free - self._headroom if is_short else num_free

    def _make_room(self, sequence: Sequence) -> bool:
        return self.preemption.make_room(sequence, sequence.need - self._room)

    def _match(self, request: Request, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        """(blocks of the longest prefix that the device knows, keys of the full blocks after it), short of the last
        token: its logits are needed. Nothing while logprobs of the prompt are still to be delivered."""
        if not self._pool.enable_prefix_caching or request.prompt_logprobs is not None:
            return [], []
        limit = (sequence.num_tokens - 1) // self._pool.block_size
        self._pool.extend(sequence.hashes, sequence.hash_seed, sequence.tokens, limit)
        hits = self._pool.match(sequence.hashes[:limit])
        return hits, sequence.hashes[len(hits) : limit]

    def _awaits_disk(self, request: Request, sequence: Sequence, now: float) -> bool:
        """What comes next of its prefix is being read."""
        return self._tiers.disk is not None and self._tiers.must_wait(sequence, self._match(request, sequence)[1], now)

    def _admit(self, request: Request, sequence: Sequence, now: float) -> None:
        self.num_admitted += 1
        request.blocked_at = None
        if sequence.adapter is not None:
            self.demands.note_admitted(sequence.adapter)
            self._undemand(sequence)
        if request.num_cached is None:
            self._admit_first(request, sequence)
        request.lane.served_at = request.home.served_at = now
        if self.gathers_for is sequence:
            self.gathers_for = None

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
        self._skip(request, sequence)
        if request.blocked_at is None:
            request.blocked_at = self.num_admitted
        if sequence.has_run or self.num_admitted - request.blocked_at >= self._config.max_bypass:
            self.has_news = False
            self.gathers_for = sequence

    def _skip(self, request: Request, sequence: Sequence) -> None:
        """Not now: it gives its adapter back."""
        if sequence.adapter is not None:
            self._residency.release(sequence.adapter.digest)
        self._num_passed += 1
        self._lanes.defer(request.lane, sequence)

    def _undemand(self, sequence: Sequence) -> None:
        if self.demands.withdraw(sequence):
            self.has_news = True
