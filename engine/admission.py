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
from engine.intake import SchedulerConfig
from engine.lanes import Lanes
from engine.sequence import Phase, Request, Sequence


class Admission:
    """has_news   something has changed since a round of admission came to its end: looking again may help
    num_admitted, num_cached_tokens  ever
    failed        requests whose adapter can't be had, with the reason; the scheduler ends them
    parked        sequences that have begun to wait for their adapter; the scheduler watches their time
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        residency: ResidencyCache,
        lanes: Lanes,
        requests: dict[str, Request],
    ) -> None:
        self.has_news = False
        self.num_admitted = 0
        self.num_cached_tokens = 0
        self.failed: list[tuple[Request, Exception]] = []
        self.parked: list[Sequence] = []
        self._config = config
        self._pool = pool
        self._residency = residency
        self._lanes = lanes
        self._requests = requests
        self._headroom = -(-pool.num_blocks // 100)
        self._num_passed = 0
        self._num_bypassed = 0
        self._shortage: tuple[int, int] | None = None
        self._demands: dict[str, dict[Sequence, float]] = {}  # by digest: who waits for it, since when

    @property
    def num_parked(self) -> int:
        """Sequences that wait for their adapter."""
        return sum(not one.is_queued for waiting in self._demands.values() for one in waiting)

    def push(self, sequence: Sequence) -> None:
        """It waits for its turn."""
        self._lanes.push(self._requests[sequence.request_id].lane, sequence)
        self.has_news = True

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended, whatever it waited for."""
        self._lanes.discard(self._requests[sequence.request_id].lane, sequence)
        self._undemand(sequence)

    def absorb(self, now: float) -> None:
        """Takes up what has happened to adapters since the last step."""
        for loaded in self._residency.poll(now):
            if loaded.error is None:
                for sequence in self._demands[loaded.digest]:
                    sequence.goes_first = True  # its turn came when it began to wait
                    self.push(sequence)
            else:
                waiting = self._demands.pop(loaded.digest)
                self.failed.extend((self._requests[one.request_id], loaded.error) for one in waiting)
            self.has_news = True

    def expiry(self, sequence: Sequence, now: float) -> float | None:
        """When it will have waited too long for its adapter to load; None if it doesn't wait for that."""
        if sequence.adapter is None or sequence.is_queued:
            return None
        digest = sequence.adapter.digest
        parked_at = self._demands.get(digest, {}).get(sequence)
        if parked_at is None:
            return None
        return max(parked_at, self._residency.loading_since(digest, now)) + self._config.adapter_wait_s

    def next(self, now: float, num_running: int) -> Sequence | None:
        """The next sequence to run, with its adapter and blocks taken; None when nobody else can run now."""
        while self.has_news:
            sequence = self._lanes.pop() if self._num_passed < self._config.lookahead else None
            if sequence is None:
                self.has_news = False
                break
            request = self._requests[sequence.request_id]
            if not self._take_adapter(request, sequence, now):
                self._num_passed += 1
            elif self._take_blocks(request, sequence, is_alone=num_running == 0):
                self._admit(request, sequence)
                return sequence
            else:
                self._pass_over(request, sequence)
        return None

    def end_round(self) -> None:
        """Those passed over are back in their places for the next round."""
        self._lanes.restore()
        self._num_passed = 0

    def _take_adapter(self, request: Request, sequence: Sequence, now: float) -> bool:
        ref, priority = sequence.adapter, sequence.rank[0]
        if ref is None:
            return True
        is_demanded = ref.digest in self._demands
        may_wait = is_demanded or len(self._demands) < self._config.max_demands
        if not is_demanded and self._is_closed(priority) and self._residency.tier(ref.digest) == "resident":
            self._lanes.defer(request.lane, sequence)
            return False
        try:
            if self._residency.acquire(ref, now, priority, may_wait):
                return True
        except AdapterError as error:
            self.failed.append((request, error))
            return False
        if may_wait:
            self._demands.setdefault(ref.digest, {})[sequence] = now
            self.parked.append(sequence)
        else:
            self._lanes.defer(request.lane, sequence)
        return False

    def _is_closed(self, priority: int) -> bool:
        """Enough requests with resident adapters have passed one for which adapter memory is short: no more of them,
        until it has room."""
        shortage = self._note_shortage()
        return (
            shortage is not None and priority >= shortage[0] and self._num_bypassed >= self._config.max_adapter_bypass
        )

    def _note_shortage(self) -> tuple[int, int] | None:
        """The demand for which memory is short. Each in turn is passed by a bounded number."""
        shortage = self._residency.shortage
        if shortage != self._shortage:
            self._shortage = shortage
            self._num_bypassed = 0
        return shortage

    def _take_blocks(self, request: Request, sequence: Sequence, is_alone: bool) -> bool:
        """Blocks for all tokens it has, those of a known prefix shared. Beside others some blocks are left for them to
        grow, or the newcomer would be the first to be preempted."""
        pool = self._pool
        room = pool.num_free - (0 if is_alone else self._headroom)
        if sequence.need > room:
            return False
        hits = self._match(request, sequence)
        num_new = pool.blocks_for(sequence.num_tokens) - len(hits)
        sequence.need = num_new + pool.count_free(hits)
        if sequence.need > room:
            return False
        pool.share(hits)
        sequence.blocks = hits + pool.allocate(num_new)
        sequence.num_computed = len(hits) * pool.block_size
        sequence.num_hashed = len(hits)
        sequence.need = 0
        return True

    def _match(self, request: Request, sequence: Sequence) -> list[int]:
        """Blocks of the longest known prefix, short of the last token: its logits are needed. None while logprobs of
        the prompt are still to be delivered."""
        if not self._pool.enable_prefix_caching or request.prompt_logprobs is not None:
            return []
        limit = (sequence.num_tokens - 1) // self._pool.block_size
        self._pool.extend(sequence.hashes, sequence.hash_seed, sequence.tokens, limit)
        return self._pool.match(sequence.hashes[:limit])

    def _admit(self, request: Request, sequence: Sequence) -> None:
        self.num_admitted += 1
        request.blocked_at = None
        if sequence.adapter is not None:
            self._note_shortage()
            self._num_bypassed += sequence.adapter.digest not in self._demands
            self._undemand(sequence)
        if request.num_cached is None:
            self._admit_first(request, sequence)
        sequence.phase = Phase.RUNNING
        sequence.has_run = sequence.goes_first = True

    def _admit_first(self, request: Request, sequence: Sequence) -> None:
        request.num_cached = min(sequence.num_computed, sequence.num_prompt)
        for one in request.sequences:
            one.num_cached = request.num_cached
        self.num_cached_tokens += request.num_cached
        self._lanes.charge(request.lane, sequence.num_prompt - request.num_cached, 0)
        self._lanes.leave(request.lane)
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

    def _undemand(self, sequence: Sequence) -> None:
        if sequence.adapter is None:
            return
        digest = sequence.adapter.digest
        waiting = self._demands.get(digest)
        if waiting is None or waiting.pop(sequence, None) is None:
            return
        self.has_news = True
        if not waiting:
            del self._demands[digest]
            self._residency.withdraw(digest)
