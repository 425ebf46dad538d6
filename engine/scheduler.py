"""Scheduler: a token budget becomes a Step; a Step and its sampled ids become Chunks. Knows no torch and no model.

There are no phases: every running sequence has tokens whose KV is not computed yet, one when it decodes, many when its
prompt is new or it was preempted, and each step computes as many of them as the budget allows. Decoding sequences go
first. Sequences join and leave at every step. When blocks run out, the last by rank gives its blocks back and is
computed again later: tokens once produced never change.
"""

from __future__ import annotations

import heapq
from bisect import insort

from adapters.residency import ResidencyCache
from adapters.spec import AdapterError, AdapterMissing
from engine.admission import Admission
from engine.block_pool import BlockPool
from engine.intake import Intake, SchedulerConfig
from engine.lanes import LaneFull, Lanes
from engine.protocol import Chunk, Failed, FailureCode, FinishReason, Generate, Refused
from engine.sequence import Phase, Request, Sequence
from engine.step import Row, Sampled, Step

RETRY_AFTER_S = 1.0


class Scheduler:
    """Who runs now, on which blocks. Synchronous: schedule → run the step → commit; add and abort in between."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, residency: ResidencyCache, lanes: Lanes) -> None:
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.requests: dict[str, Request] = {}
        self.running: list[Sequence] = []  # by rank
        self._config = config
        self._pool = pool
        self._residency = residency
        self._lanes = lanes
        self._intake = Intake(config, pool.num_blocks, pool.block_size)
        self._admission = Admission(config, pool, residency, lanes, self.requests)
        self._copies: list[tuple[int, int]] = []  # for the next step; a new owner of a block writes before it reads
        self._timers: list[tuple[float, int, str, int]] = []  # (due, ticket, request id, choice or -1 for the deadline)
        self._num_timers = 0
        self._turn = 0
        self._outbox: list[Chunk | Failed] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._outbox)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait: for their turn, for blocks or for their adapter."""
        begun = sum(one.has_run and one.phase is Phase.WAITING for r in self.requests.values() for one in r.sequences)
        return self._lanes.num_waiting + begun

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache has given."""
        return self._admission.num_cached_tokens

    @property
    def num_waiting_adapter(self) -> int:
        return self._admission.num_parked

    # ---- arrivals and departures

    def add(self, message: Generate, now: float) -> None:
        """Takes the request in, or raises Refused."""
        if message.id in self.requests:
            raise Refused("invalid_request", f"a request {message.id} is under way", param="id")
        self._intake.check(message)
        if message.adapter is not None:
            try:
                self._residency.check(message.adapter, now)
            except AdapterError as error:
                code, text, retry_after_s = _adapter_failure(error)
                raise Refused(code, text, retry_after_s) from None
        if self._lanes.num_waiting >= self._config.max_waiting:
            raise Refused("queue_full", f"{self._lanes.num_waiting} requests wait already", RETRY_AFTER_S)
        try:
            lane = self._lanes.enter(message.lane, message.priority, message.weight)
        except LaneFull:
            raise Refused("lane_full", "too many requests of yours wait already", RETRY_AFTER_S) from None
        request = self.requests[message.id] = self._intake.request(message, lane, now)
        if request.deadline is not None:
            self._set_timer(request.deadline, message.id, -1)
        self._start(request, now)

    def abort(self, request_id: str) -> None:
        """Whatever phase it is in, it is gone. An unknown id is no error: it may have just ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request)

    def take_outbox(self) -> list[Chunk | Failed]:
        """What there is to say since the last time."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # ---- a step

    def schedule(self, now: float) -> Step | None:
        """The next step; None when nothing can run. Its rows hold all blocks that they write."""
        self._expire(now)
        self._admission.absorb(now)
        self._end_failed()
        rows: dict[Sequence, Row] = {}
        budget = self._schedule_running(rows)
        self._schedule_waiting(rows, budget, now)
        if not rows:
            return None
        copies, self._copies = tuple(self._copies), []
        return Step(tuple(rows.values()), copies)

    def commit(self, step: Step, sampled: list[Sampled]) -> list[Chunk | Failed]:
        """Takes up the outcome of a step. Rows whose sequence has gone since are ignored."""
        has_ended = False
        for row, result in zip(step.rows, sampled, strict=True):
            sequence = row.sequence
            if sequence.phase is not Phase.RUNNING:
                continue
            request = self.requests[sequence.request_id]
            self._advance(request, row, result)
            if row.samples and result.token_id is None:
                self._fail(request, "engine_error", "the model's numbers overflowed with this adapter")
                continue
            finish = self._append(request, sequence, result) if row.samples else None
            if not request.has_forked and sequence.num_computed >= sequence.num_prompt:
                self._fork(request, sequence)
            if finish is not None:
                self._finish(request, sequence)
                has_ended = True
        if has_ended:
            self.running = [one for one in self.running if one.phase is Phase.RUNNING]
        return self.take_outbox()

    # ---- inside: arrivals and departures

    def _start(self, request: Request, now: float) -> None:
        message = request.message
        for sequence in request.sequences:
            if sequence.phase is Phase.DONE:  # its replayed output was complete
                stop_id = sequence.tokens[-1] if sequence.is_stopped else None
                finish: FinishReason = "length" if stop_id is None else "stop"
                self._outbox.append(Chunk(message.id, sequence.choice, sequence.num_output, [], finish, stop_id))
        self.num_prompt_tokens += len(message.prompt)
        if request.is_done:
            self._end(request)
            return
        if message.adapter is not None:
            self._residency.prefetch(message.adapter, now)
        self._admission.push(request.leader)

    def _fail(self, request: Request, code: FailureCode, text: str, retry_after_s: float | None = None) -> None:
        self._outbox.append(Failed(request.message.id, code, text, retry_after_s))
        self._end(request)

    def _end_failed(self) -> None:
        failed, self._admission.failed = self._admission.failed, []
        for request, error in failed:
            if request.message.id in self.requests:
                self._fail(request, *_adapter_failure(error))

    def _end(self, request: Request) -> None:
        """Gives back everything that the request holds, in whatever phase it is."""
        for sequence in request.sequences:
            if sequence.phase is Phase.RUNNING:
                self.running.remove(sequence)
                self._release(sequence)
            elif sequence.phase is Phase.WAITING:
                self._admission.forget(sequence)
            sequence.phase = Phase.DONE
        if request.num_cached is None:
            self._lanes.leave(request.lane)
        elif request.message.adapter is not None:
            self._residency.drop(request.message.adapter.digest)
        self._lanes.close(request.lane)
        del self.requests[request.message.id]

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        if sequence.adapter is not None:
            self._residency.release(sequence.adapter.digest)
        self._admission.has_news = True

    def _set_timer(self, due: float, request_id: str, choice: int) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (due, self._num_timers, request_id, choice))

    def _expire(self, now: float) -> None:
        """Ends what has passed its deadline or has waited too long for its adapter."""
        while self._timers and self._timers[0][0] <= now:
            _, _, request_id, choice = heapq.heappop(self._timers)
            request = self.requests.get(request_id)
            if request is None:
                continue
            if choice < 0:
                if request.deadline is not None and request.deadline <= now:
                    self._fail(request, "deadline", f"not finished within {request.message.timeout_s:g} s")
                continue
            due = self._admission.expiry(request.sequences[choice], now)
            if due is not None and due <= now:
                text = f"the adapter was not loaded within {self._config.adapter_wait_s:g} s"
                self._fail(request, "adapter_loading", text, RETRY_AFTER_S)
            elif due is not None:
                self._set_timer(due, request_id, choice)

    # ---- inside: a step

    def _schedule_running(self, rows: dict[Sequence, Row]) -> int:
        """Rows for running sequences; what is left of the budget."""
        budget = self._config.max_batched_tokens
        for sequence in self._order():
            if budget == 0:
                break
            if sequence.phase is not Phase.RUNNING:
                continue
            budget += self._secure_block(sequence, rows)
            if sequence.phase is Phase.RUNNING:
                budget -= self._add_row(rows, sequence, budget)
        self._turn += len(rows)
        return budget

    def _order(self) -> list[Sequence]:
        """Decoding sequences first, then prompts, each by rank; by turns when the budget has no token for each."""
        running = self.running
        if len(running) > self._config.max_batched_tokens:
            first = self._turn % len(running)
            return running[first:] + running[:first]
        order = [one for one in running if len(one.tokens) - one.num_computed == 1]
        if len(order) < len(running):
            order += [one for one in running if len(one.tokens) - one.num_computed > 1]
        return order

    def _add_row(self, rows: dict[Sequence, Row], sequence: Sequence, budget: int) -> int:
        pending = len(sequence.tokens) - sequence.num_computed
        num_tokens = min(pending, budget)
        rows[sequence] = Row(sequence, sequence.num_computed, num_tokens, num_tokens == pending)
        return num_tokens

    def _secure_block(self, sequence: Sequence, rows: dict[Sequence, Row]) -> int:
        """A block for the newest token if it needs one, preempting the last by rank as often as necessary (itself, if
        it is the last). Returns the tokens of rows that went with them."""
        freed = 0
        if len(sequence.tokens) <= len(sequence.blocks) * self._pool.block_size:
            return freed
        while self._pool.num_free == 0:
            victim = self.running[-1]
            freed += self._preempt(victim, rows)
            if victim is sequence:
                return freed
        sequence.blocks += self._pool.allocate(1)
        return freed

    def _preempt(self, victim: Sequence, rows: dict[Sequence, Row]) -> int:
        """Its blocks are free, its tokens stay; it waits before all newer work of its class."""
        self.num_preemptions += 1
        self.running.remove(victim)
        self._release(victim)
        victim.phase = Phase.WAITING
        self._admission.push(victim)
        row = rows.pop(victim, None)
        return row.num_tokens if row is not None else 0

    def _schedule_waiting(self, rows: dict[Sequence, Row], budget: int, now: float) -> None:
        admission = self._admission
        if not admission.has_news:
            return
        while budget > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = admission.next(now, len(self.running))
            if sequence is None:
                break
            insort(self.running, sequence, key=_rank)
            budget -= self._add_row(rows, sequence, budget)
        admission.end_round()
        for sequence in admission.parked:
            self._set_timer(now + self._config.adapter_wait_s, sequence.request_id, sequence.choice)
        admission.parked.clear()
        self._end_failed()

    # ---- inside: commit

    def _advance(self, request: Request, row: Row, result: Sampled) -> None:
        """The row's positions are computed; blocks that are full now may be found by their content."""
        sequence, pool = row.sequence, self._pool
        if request.prompt_logprobs is not None and result.prompt_logprobs:
            first = row.start + 1
            request.prompt_logprobs[first : first + len(result.prompt_logprobs)] = result.prompt_logprobs
        sequence.num_computed += row.num_tokens
        num_full = sequence.num_computed // pool.block_size
        if num_full > sequence.num_hashed and pool.enable_prefix_caching:
            pool.extend(sequence.hashes, sequence.hash_seed, sequence.tokens, num_full)
            for index in range(sequence.num_hashed, num_full):
                pool.register(sequence.blocks[index], sequence.hashes[index])
            sequence.num_hashed = num_full

    def _append(self, request: Request, sequence: Sequence, result: Sampled) -> FinishReason | None:
        """One token more; why it was the last, if it was."""
        assert result.token_id is not None
        sequence.tokens.append(result.token_id)
        self.num_generated_tokens += 1
        self._lanes.charge(request.lane, 0, 1)
        finish: FinishReason | None = None
        if sequence.is_stopped:
            finish = "stop"
        elif len(sequence.tokens) >= sequence.max_len:
            finish = "length"
        self._outbox.append(
            Chunk(
                sequence.request_id, sequence.choice, sequence.num_output - 1, [result.token_id], finish,
                result.token_id if finish == "stop" else None, sequence.num_cached,
                None if result.logprobs is None else [result.logprobs], request.prompt_logprobs,
            )
        )  # fmt: skip
        request.prompt_logprobs = None
        return finish

    def _fork(self, request: Request, leader: Sequence) -> None:
        """The prompt is computed: the other choices go on from it. Full blocks are shared; the block that they go on
        writing is copied. A choice for which there is no row or block now waits, and finds the prefix later."""
        request.has_forked = True
        for sequence in request.sequences:
            if sequence is leader or sequence.phase is Phase.DONE:
                continue
            if not self._fork_now(leader, sequence):
                sequence.has_run = sequence.goes_first = True
                self._admission.push(sequence)

    def _fork_now(self, leader: Sequence, sequence: Sequence) -> bool:
        pool = self._pool
        num_shared = min(sequence.num_prompt, sequence.num_tokens - 1)
        num_full = num_shared // pool.block_size
        num_new = pool.blocks_for(sequence.num_tokens) - num_full
        if len(self.running) >= self._config.max_num_seqs or pool.num_free < num_new:
            return False
        if sequence.adapter is not None:
            self._residency.pin(sequence.adapter.digest)
        shared = leader.blocks[:num_full]
        pool.share(shared)
        sequence.blocks = shared + pool.allocate(num_new)
        if num_shared % pool.block_size:
            self._copies.append((leader.blocks[num_full], sequence.blocks[num_full]))
        sequence.num_computed = num_shared
        sequence.num_hashed = num_full
        sequence.hashes = leader.hashes[:num_full]
        sequence.phase, sequence.has_run, sequence.goes_first = Phase.RUNNING, True, True
        insort(self.running, sequence, key=_rank)
        return True

    def _finish(self, request: Request, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.phase = Phase.DONE
        if request.is_done:
            self._end(request)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _adapter_failure(error: Exception) -> tuple[FailureCode, str, float | None]:
    if isinstance(error, AdapterMissing):
        return "adapter_not_found", error.message, None
    if isinstance(error, AdapterError):
        return "adapter_invalid", error.message, None
    if isinstance(error, OSError):
        return "adapter_loading", f"the adapter could not be read: {error}", RETRY_AFTER_S
    return "engine_error", "loading the adapter failed", None
