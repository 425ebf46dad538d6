"""Inference: the spine. stream() resolves a name, encodes, holds quota, asks an engine, and gives an Answer: deltas of
text, with abort, settlement and the usage entry when it is closed, however it ends. Knows no HTTP.

    model name → Model (last use of a name) → prompt ids → hold → Generate → chunks → text → settle
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.client import Engine, Generation
from engine.params import SamplingParams
from engine.protocol import Broken, Chunk, EngineError, FinishReason, Generate, Ready, TokenLogprobs
from engine.text import TextStream, TextToken, Tokenizer
from gateway.metrics import Metrics
from gateway.models import Model, ModelTable
from gateway.prompts import Chat, Prompt, PromptEncoder, too_long
from gateway.replicas import ReplicaSet
from tenants.quotas import Hold, Quotas, Stale
from tenants.usage import Status, UsageRecord

if TYPE_CHECKING:
    from tenants.keys import Principal

Renew = Callable[[], "Awaitable[Principal]"]
"""Authenticates again, so that nothing cached decides; raises when the key is no longer good."""
UNLIMITED_ESTIMATE = 512
"""Tokens reserved per choice when the client set no max_tokens; what is really used is settled."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client wants. `param` is the request field that held the prompts, for errors.

    Choice j of prompt i has index i·n + j. params.max_tokens None = as many as the context has room for.
    without_output: only the prompts are wanted (echo with max_tokens 0): one token is computed, none given or billed.
    """

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    param: str = "messages"
    endpoint: str = "chat/completions"
    request_id: str = ""
    user: str = ""
    tags: dict[str, str] | None = None
    without_output: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What comes next in one choice. `tokens` are those whose text is now complete; `prompt_logprobs`, when asked for,
    come once, with the first delta of a prompt's first choice."""

    choice: int
    text: str
    tokens: tuple[TextToken, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class Usage:
    """Tokens so far, over all prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Inference:
    """One gateway worker's way to the engines."""

    def __init__(
        self, *, models: ModelTable, replicas: ReplicaSet, quotas: Quotas, metrics: Metrics, encoder: PromptEncoder,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.models = models
        self.encoder = encoder
        self._replicas = replicas
        self._quotas = quotas
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer

    async def stream(self, principal: Principal, ask: Ask, renew: Renew) -> Answer:
        """An answer that an engine has accepted; the caller closes it, always. Everything that can be refused is
        refused here, before anything is charged.

        Raises ModelNotFound, PromptError, ParamsError, QuotaExceeded, EngineError, StateUnavailable, and what `renew`
        raises. Cancelling it leaves nothing behind.
        """
        started = time.monotonic()
        principal, model = await self.models.resolve(principal, ask.model, renew)
        ready = self._replicas.ready()
        ask.params.check_vocabulary(ready.vocab_size)
        prompts = await self.encoder.encode(ask.prompts, ask.param, ready)
        outputs = [_output_tokens(ask, len(ids), ready) for ids in prompts]
        attempt = secrets.token_hex(16)
        for is_last_try in (False, True):
            record = _record(attempt, principal, model, ask, prompts)
            reserved = record.prompt_tokens + ask.params.n * sum(min(n, _estimate(ask, n)) for n in outputs)
            try:
                hold = await self._quotas.hold(principal, record, reserved)
                break
            except Stale:
                if is_last_try:
                    raise
                principal, model = await self.models.renewed(ask.model, renew)
        answer = Answer(self, ask, model, hold, record, started)
        try:
            await answer._start(self._requests(attempt, principal, model, ask, prompts, outputs), self._replicas)
        except BaseException as error:
            answer.failed(error)
            await answer.aclose()
            raise
        return answer

    def _requests(
        self, attempt: str, principal: Principal, model: Model, ask: Ask, prompts: list[list[int]], outputs: list[int]
    ) -> list[Generate]:
        return [
            Generate(
                id=attempt if len(prompts) == 1 else f"{attempt}-{i}",
                prompt=ids,
                params=msgspec.structs.replace(ask.params, max_tokens=output),
                adapter=model.adapter,
                lane=principal.tenant_id,
                weight=principal.lane_weight,
                priority=principal.priority,
                cache_salt=principal.cache_salt,
                timeout_s=self._timeout_s,
            )
            for i, (ids, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def finish(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` to its end, whoever is cancelled meanwhile."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def settle(self, hold: Hold, record: UsageRecord) -> None:
        """One entry in the ledger; the same numbers in the metrics."""
        await self._quotas.settle(hold, record)
        self._metrics.add("chorus_attempts", record.status)
        for kind in ("prompt", "cached", "completion"):
            self._metrics.add("chorus_tokens", kind, value=getattr(record, f"{kind}_tokens"))
        if record.first_token_s is not None:
            self._metrics.observe("chorus_first_token_seconds", seconds=record.first_token_s)

    async def close(self) -> None:
        """Waits for the settlements under way."""
        while self._closing:
            await asyncio.wait(self._closing)
        self.encoder.close()


class Answer:
    """An accepted request: iterate for its deltas, then close it. `usage` counts while it runs.

    id           unique, for the client's eyes too      created   Unix seconds
    prompt_ids   the prompts as the engine got them     fingerprint   changes with base weights and adapter version
    """

    def __init__(
        self, inference: Inference, ask: Ask, model: Model, hold: Hold, record: UsageRecord, started: float
    ) -> None:
        self.id = record.attempt_id
        self.created = int(time.time())
        self.model = model
        self.ask = ask
        self.hold = hold
        self.usage = Usage(prompt_tokens=record.prompt_tokens)
        self.prompt_ids: list[list[int]] = []
        self.fingerprint = ""
        self._inference = inference
        self._record = record
        self._started = started
        self._times: dict[str, float] = {}
        self._status: Status = "cancelled"
        self._generations: list[Generation] = []
        self._texts: list[TextStream] = []
        self._deltas: AsyncIterator[Delta] | None = None
        self._closed: asyncio.Task[None] | None = None

    async def _start(self, requests: list[Generate], replicas: ReplicaSet) -> None:
        engine = replicas.choose(self.model.adapter)
        for request in requests:
            self._generations.append(await engine.generate(request))
        self._times["queue_s"] = time.monotonic() - self._started
        self.prompt_ids = [request.prompt for request in requests]
        self.fingerprint = fingerprint(engine, self.model)
        self._texts = [
            TextStream(self._inference.tokenizer, self.ask.params, starts_text=isinstance(prompt, Chat))
            for prompt in self.ask.prompts
            for _ in range(self.ask.params.n)
        ]
        self._deltas = self._run()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Delta:
        """Raises Broken when the engine fails in mid-stream."""
        assert self._deltas is not None
        try:
            return await self._deltas.__anext__()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self.failed(error)
            raise

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        await self.aclose()

    def failed(self, error: BaseException) -> None:
        """Remember, for the ledger, what ended it."""
        if isinstance(error, EngineError):
            self._status = "timeout" if error.code == "deadline" else "error"
            if not isinstance(error, Broken) and not self.usage.completion_tokens:
                self._status = "refused"
        elif isinstance(error, Exception):
            self._status = "error"

    async def aclose(self) -> None:
        """Aborts what still runs and settles what was used, exactly once; goes on to its end if the caller is
        cancelled."""
        if self._closed is None:
            self._closed = self._inference.finish(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        for generation in self._generations:
            await generation.aclose()
        is_computed = self._status != "refused" and bool(self._generations)
        if self._status == "error" and "first_token_s" not in self._times:
            is_computed = False
        await self._inference.settle(
            self.hold,
            msgspec.structs.replace(
                self._record,
                status=self._status,
                prompt_tokens=self.usage.prompt_tokens if is_computed else 0,
                completion_tokens=self.usage.completion_tokens,
                cached_tokens=self.usage.cached_tokens,
                total_s=time.monotonic() - self._started,
                **self._times,
            ),
        )

    async def _run(self) -> AsyncIterator[Delta]:
        num_running = len(self._texts)
        async for prompt, chunk in _merge(self._generations):
            delta = self._read(prompt, chunk)
            if delta is None:
                continue
            num_running -= delta.finish is not None
            if not num_running:
                self._status = "ok"
            yield delta
            if not num_running:
                return
        if num_running:
            raise Broken("engine_error", "The engine ended the stream too early.")

    def _read(self, prompt: int, chunk: Chunk) -> Delta | None:
        self._times.setdefault("first_token_s", time.monotonic() - self._started)
        choice = prompt * self.ask.params.n + chunk.choice
        stream = self._texts[choice]
        if stream.finished:
            return None
        if chunk.choice == 0 and chunk.start == 0:
            self.usage.cached_tokens += chunk.num_cached_tokens
        before = stream.num_tokens
        text = stream.push(chunk)
        if self.ask.without_output:
            return Delta(choice, "", (), text.finish, None, chunk.prompt_logprobs)
        self.usage.completion_tokens += stream.num_tokens - before
        self.hold.completion_tokens = self.usage.completion_tokens
        if not (text.text or text.tokens or text.finish or chunk.prompt_logprobs):
            return None
        return Delta(choice, text.text, text.tokens, text.finish, text.stop_reason, chunk.prompt_logprobs)


async def _merge(generations: list[Generation]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of all, as they come, each with its generation's index."""
    if len(generations) == 1:
        async for chunk in generations[0]:
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | BaseException | None]] = asyncio.Queue()

    async def read(index: int, generation: Generation) -> None:
        try:
            async for chunk in generation:
                queue.put_nowait((index, chunk))
            queue.put_nowait((index, None))
        except EngineError as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(read(index, generation)) for index, generation in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()


def _output_tokens(ask: Ask, num_prompt: int, ready: Ready) -> int:
    """How many tokens each choice may produce. Raises PromptTooLong when more are asked for than fit."""
    room = ready.max_model_len - num_prompt
    asked = ask.params.max_tokens
    if asked is not None and asked > room:
        wanted = f"{num_prompt + asked} tokens ({num_prompt} in the prompt, {asked} of output)"
        raise too_long(ready.max_model_len, wanted, ask.param)
    return room if asked is None else asked


def _estimate(ask: Ask, output: int) -> int:
    if ask.without_output:
        return 0
    return UNLIMITED_ESTIMATE if ask.params.max_tokens is None else output


def _record(attempt: str, principal: Principal, model: Model, ask: Ask, prompts: list[list[int]]) -> UsageRecord:
    return UsageRecord(
        attempt_id=attempt,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        model=model.name,
        request_id=ask.request_id,
        adapter=model.adapter.digest if model.adapter else "",
        adapter_version=model.version,
        endpoint=ask.endpoint,
        prompt_tokens=sum(len(ids) for ids in prompts),
        user=ask.user,
        tags=ask.tags,
    )


def fingerprint(engine: Engine, model: Model) -> str:
    """OpenAI's system_fingerprint: the same as long as base weights and adapter version are."""
    base = engine.ready.fingerprint if engine.ready else ""
    digest = model.adapter.digest if model.adapter else ""
    return "fp_" + hashlib.sha256(f"{base}:{digest}".encode()).hexdigest()[:12]
