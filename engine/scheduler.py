"""Scheduler: a token budget becomes a Step; a Step and its sampled ids become Chunks. Knows no torch and no model.

There are no phases: every running sequence has tokens whose KV is not computed yet, one when it decodes, many when its
prompt is new or it was preempted, and each step computes as many of them as the budget allows. Decoding sequences go
first. Sequences join and leave at every step. Who gives way when something is short, Preemption decides; tokens once
produced never change.
"""

from __future__ import annotations

from collections import Counter

from adapters.residency import ResidencyCache
from adapters.spec import AdapterError, AdapterMissing
from engine.admission import Admission
from engine.ageing import Ageing
from engine.block_pool import BlockPool
from engine.intake import Intake, SchedulerConfig
from engine.kv_tiers import KVTiers, no_tiers
from engine.lane import Lane
from engine.lanes import LaneFull, Lanes
from engine.progress import Progress
from engine.protocol import Chunk, Failed, FailureCode, Generate, Refused
from engine.running import Running
from engine.sequence import Phase, Request, Sequence
from engine.step import Draft, Sampled, Step
from engine.timers import Timers

RETRY_AFTER_S = 1.0


class Scheduler:
    """Who runs now, on which blocks. Synchronous: schedule → run the step → commit; add and abort in between."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        residency: ResidencyCache,
        lanes: Lanes,
        tiers: KVTiers | None = None,
    ) -> None:
        self.num_prompt_tokens = 0
        self.requests: dict[str, Request] = {}
        self.tiers = tiers or no_tiers(pool)
        self.holding = Running(config.max_num_seqs, pool, residency, lanes, self.requests, self.tiers)
        self.admission = Admission(config, pool, residency, lanes, self.holding, self.requests, self.tiers)
        self.progress = Progress(pool, lanes, self.holding)
        self._config = config
        self._pool = pool
        self._residency = residency
        self.lanes = lanes
        self.num_failures: Counter[str] = Counter()
        self.num_arrivals: Counter[str] = Counter()
        self._intake = Intake(config, pool.num_blocks, pool.block_size)
        self._ageing = Ageing(lanes, self.requests, config.ageing_s)
        self._deadlines: Timers[Request] = Timers()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.progress.outbox)

    @property
    def running(self) -> list[Sequence]:
        """By rank."""
        return self.holding.rows

    @property
    def num_preemptions(self) -> int:
        """Times that blocks were given up."""
        return self.holding.num_stripped

    # ---- arrivals and departures

    def add(self, message: Generate, now: float) -> None:
        """Takes the request in, or raises Refused."""
        try:
            lane = self._admit(message, now)
        except Refused as refused:
            self.num_failures[refused.code] += 1
            raise
        request = self.requests[message.id] = self._intake.request(message, lane, now)
        if request.deadline is not None:
            self._deadlines.set(request.deadline, request)
        self._start(request, now)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Whatever phase it is in, it is gone; of one choice that runs beside others, a last chunk says so. What is
        unknown is no error: it may have just ended."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if choice is None:
            self._end(request)
        elif request.has_forked and request.sequences[choice].phase is not Phase.DONE:
            sequence = request.sequences[choice]
            self.progress.outbox.append(Chunk(request_id, choice, sequence.num_output, [], "stop"))
            self._stop(sequence)
            if request.is_done:
                self._end(request)

    def take_outbox(self) -> list[Chunk | Failed]:
        """What there is to say since the last time."""
        return self.progress.take_outbox()

    # ---- a step

    def schedule(self, now: float) -> Step | None:
        """The next step; None when nothing can run. Its rows hold all blocks that they write."""
        self._expire(now)
        for request in self._ageing.due(now):
            self.admission.lift(request)
            self._ageing.watch(request.lane, now)
        self.admission.absorb(now)
        if self.tiers.poll(now):
            self.admission.has_news = True
        self._end_failed()
        draft = self.holding.draft = Draft(self._config.max_batched_tokens)
        self._schedule_running(draft)
        while draft.num_left > 0:
            sequence = self.admission.next(now)
            if sequence is None:
                break
            if not sequence.is_arriving:
                draft.add(sequence)
        self.admission.end_round()
        self._end_failed()
        rows = draft.rows
        if not rows and not self.tiers.has_loads:
            return None
        stores, loads = self.tiers.take()
        return Step(rows, self.progress.take_copies(), stores, loads)

    def commit(self, step: Step, sampled: list[Sampled]) -> list[Chunk | Failed]:
        """Takes up the outcome of a step. Rows whose sequence has gone since are ignored."""
        progress = self.progress
        self.tiers.settle()
        for row, result in zip(step.rows, sampled, strict=True):
            sequence = row.sequence
            if sequence.phase is not Phase.RUNNING:
                continue
            request = self.requests[sequence.request_id]
            progress.advance(request, row, result)
            if row.samples and result.token_id is None:
                self._fail(request, "engine_error", "the model's numbers overflowed with this adapter")
                continue
            finish = progress.append(request, sequence, result) if row.samples else None
            if not request.has_forked and sequence.num_computed >= sequence.num_prompt:
                for other in progress.fork(request, sequence):
                    other.has_run = other.goes_first = True
                    self.admission.push(other)
            if finish is not None:
                self._finish(request, sequence)
        return progress.take_outbox()

    # ---- inside

    def _admit(self, message: Generate, now: float) -> Lane:
        """Where it may wait; or raises Refused."""
        if message.id in self.requests:
            raise Refused("invalid_request", f"a request {message.id} is under way", param="id")
        self._intake.check(message)
        if message.adapter is not None:
            try:
                self._residency.check(message.adapter, now)
            except AdapterError as error:
                code, text, retry_after_s = _adapter_failure(error)
                raise Refused(code, text, retry_after_s) from None
        if self.lanes.num_waiting >= self._config.max_waiting:
            raise Refused("queue_full", f"{self.lanes.num_waiting} requests wait already", RETRY_AFTER_S)
        try:
            return self.lanes.enter(message.lane, message.priority, message.weight)
        except LaneFull:
            limit = self.lanes.max_waiting_per_lane
            numbers = f"Limit {limit}, Used {limit}, Requested 1"
            raise Refused("lane_full", f"Too many of your requests wait already: {numbers}.", RETRY_AFTER_S) from None

    def _start(self, request: Request, now: float) -> None:
        message = request.message
        self.progress.tell_done(request)
        self.num_prompt_tokens += len(message.prompt)
        if request.is_done:
            self._end(request)
            return
        if message.adapter is not None and self._residency.prefetch(message.adapter, now):
            mib = message.adapter.size_bytes / (1 << 20)
            self.lanes.charge(request.lane, mib * self._config.adapter_cost_per_mib, 0)
        self.admission.push(request.leader)
        self._ageing.watch(request.lane, now)

    def _schedule_running(self, draft: Draft) -> None:
        """Rows for running sequences, with a block for the newest token of each."""
        for sequence in self.holding.order(draft.num_left):
            if draft.num_left == 0:
                break
            if sequence.phase is not Phase.RUNNING:
                continue
            if len(sequence.tokens) > len(sequence.blocks) * self._pool.block_size:
                if not self.admission.preemption.grow(sequence):
                    continue
                sequence.blocks += self._pool.allocate(1)
            draft.add(sequence)

    def _expire(self, now: float) -> None:
        """Ends what has passed its deadline or has waited too long for its adapter."""
        for request in self._deadlines.due(now):
            if not request.is_done:
                self._fail(request, "deadline", f"not finished within {request.message.timeout_s:g} s")
        for request in self.admission.demands.late(now):
            text = f"the adapter was not loaded within {self._config.adapter_wait_s:g} s"
            self._fail(request, "adapter_loading", text, RETRY_AFTER_S)

    def _finish(self, request: Request, sequence: Sequence) -> None:
        self._stop(sequence)
        if request.is_done:
            self._end(request)

    def _fail(self, request: Request, code: FailureCode, text: str, retry_after_s: float | None = None) -> None:
        self.num_failures[code] += 1
        self.progress.tell_failed(request, code, text, retry_after_s)
        self._end(request)

    def _end_failed(self) -> None:
        failed, self.admission.failed = self.admission.failed, []
        for request, error in failed:
            if request.message.id in self.requests:
                self._fail(request, *_adapter_failure(error))

    def _end(self, request: Request) -> None:
        """Gives back everything that the request holds, in whatever phase it is."""
        for sequence in request.sequences:
            self._stop(sequence)
        if request.num_cached is None:
            self.lanes.leave(request.home)
        elif request.message.adapter is not None:
            self._residency.drop(request.message.adapter.digest)
        self.lanes.close(request)
        del self.requests[request.message.id]

    def _stop(self, sequence: Sequence) -> None:
        if sequence.phase in (Phase.RUNNING, Phase.PAUSED):
            self.holding.end(sequence)
            self.admission.has_news = True
        elif sequence.phase is Phase.WAITING:
            self.admission.forget(sequence)
        sequence.phase = Phase.DONE


def _adapter_failure(error: Exception) -> tuple[FailureCode, str, float | None]:
    if isinstance(error, AdapterMissing):
        return "adapter_not_found", error.message, None
    if isinstance(error, AdapterError):
        return "adapter_invalid", error.message, None
    if isinstance(error, OSError):
        return "adapter_loading", f"the adapter could not be read: {error}", RETRY_AFTER_S
    return "engine_error", "loading the adapter failed", None
