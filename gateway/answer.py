"""Answer: one accepted request: its deltas, what it used, and its one end. Ask: what was wanted. Knows no HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from engine.client import Engine, Generation
from engine.params import SamplingParams
from engine.protocol import Broken, Chunk, EngineError, FinishReason, Generate, TokenLogprobs
from engine.text import Tokenizer
from engine.text_stream import TextStream, TextToken
from gateway.merged import Chunks, joined
from gateway.models import Model
from gateway.prompts import Chat, Prompt, Truncation, opening
from gateway.replicas import ReplicaSet
from tenants.quotas import Hold
from tenants.usage import Status, UsageRecord

if TYPE_CHECKING:
    from gateway.inference import Inference


TOP_UP_MARGIN = 64
"""So many tokens before a reservation is used up, more is asked for."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client wants. `param` is the request field that held the prompts, for errors.

    Choice j of prompt i has index i·n + j. params.max_tokens None = as many as the context has room for.
    cache_salt: apart from the tenant's own, for prompts that only requests of equal salt may find in the prefix cache.
    token_ids: every Delta tells the ids that it stands for, also while their text is held back.
    conversation: where the client says which one this is; else it is known by how it opens. Decides about canaries.
    tokenizer: of a model with tokens of its own; None = the base's.
    given: fields of `params` that the client set itself; the model's own defaults fill the others.
    is_limit_soft: max_tokens is such a default, and gives way where the context has less room.
    without_output: only the prompts are wanted (echo with max_tokens 0): one token is computed, none given or billed.
    """

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    param: str = "messages"
    endpoint: str = "chat/completions"
    request_id: str = ""
    user: str = ""
    conversation: str = ""
    tokenizer: Tokenizer | None = None
    given: frozenset[str] = frozenset()
    is_limit_soft: bool = False
    tags: dict[str, str] | None = None
    without_output: bool = False
    truncation: Truncation | None = None
    cache_salt: str = ""
    token_ids: bool = False

    def whose(self) -> str:
        """What stays the same over a conversation: its id, else the user, else its opening."""
        if self.conversation or self.user:
            return f"conversation:{self.conversation}" if self.conversation else f"user:{self.user}"
        return f"opening:{opening(self.prompts[0])}" if self.prompts else ""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What comes next in one choice. `tokens`, where logprobs are asked for, are those whose text is now complete;
    `prompt_logprobs`, when asked for, come once, with the first delta of a prompt's first choice; `ids`, when asked
    for, are all that were produced."""

    choice: int
    text: str
    tokens: tuple[TextToken, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Usage:
    """Tokens so far, over all prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Answer:
    """An accepted request: iterate for what has come of its deltas, then close it. `usage` counts while it runs.

    is_whole     nobody sees a part of it before its end: set by who takes it so
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
        self.is_whole = False
        self._inference = inference
        self._record = record
        self._started = started
        self._times: dict[str, float] = {}
        self._status: Status = "cancelled"
        self._generations: list[Generation] = []
        self._texts: list[TextStream] = []
        self._chunks = Chunks(())
        self._num_running = 0
        self._next_top_up = 0
        self._topping_up: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None] | None = None

    async def start(self, requests: list[Generate], replicas: ReplicaSet) -> None:
        """Returns when an engine has accepted all of them. Raises Refused or Unavailable."""
        engine = replicas.choose(self.model.adapter)
        for request in requests:
            self._generations.append(await engine.generate(request))
        self._times["queue_s"] = time.monotonic() - self._started
        self.prompt_ids = [request.prompt for request in requests]
        self.fingerprint = fingerprint(engine, self.model)
        self._texts = [
            TextStream(self.tokenizer, self.ask.params, starts_text=isinstance(prompt, Chat))
            for prompt in self.ask.prompts
            for _ in range(self.ask.params.n)
        ]
        self._chunks = Chunks(self._generations)
        self._num_running = len(self._texts)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.ask.tokenizer or self._inference.tokenizer

    @property
    def tier(self) -> str:
        """Where its adapter lay when the engine took it: resident, host or disk; empty without one."""
        return self._generations[0].accepted.tier if self._generations else ""

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[Delta]:
        """At least one. Raises Broken when the engine fails in mid-stream."""
        try:
            while self._num_running:
                chunks = await self._chunks.next()
                if self.is_whole:
                    chunks = joined(chunks)
                found = [self._read(prompt, chunk) for prompt, chunk in chunks]
                deltas = [delta for delta in found if delta is not None]
                if deltas:
                    return deltas
        except BaseException as error:
            self.failed(error)
            raise
        raise StopAsyncIteration

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
        cancelled. Returns when it is settled: who sees the end has a free place. Where that is no question, when the
        settlement is on its way."""
        if self._closed is None and self._topping_up is None and not self._chunks.has_tasks:
            for generation in self._generations:
                generation.close()
            self._closed = self._settle()
            if self.hold.is_roomy:
                return
        elif self._closed is None:
            self._closed = self._inference.finish(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        """Where something is still under way."""
        await self._chunks.close()
        for generation in self._generations:
            generation.close()
        if self._topping_up is not None:
            await self._topping_up
        await self._settle()

    def _settle(self) -> asyncio.Future[None]:
        is_computed = self._status != "refused" and bool(self._generations)
        if self._status == "error" and "first_token_s" not in self._times:
            is_computed = False
        return self._inference.settle(
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

    def _read(self, prompt: int, chunk: Chunk) -> Delta | None:
        if "first_token_s" not in self._times:
            self._times["first_token_s"] = time.monotonic() - self._started
        choice = prompt * self.ask.params.n + chunk.choice
        stream = self._texts[choice]
        if stream.finished:
            return None
        if chunk.choice == 0 and chunk.start == 0:
            self.usage.cached_tokens += chunk.num_cached_tokens
        before = stream.num_tokens
        text = stream.push(chunk)
        if text.finish is not None:
            self._finished(prompt, chunk)
        if self.ask.without_output:
            return Delta(choice, "", (), text.finish, None, chunk.prompt_logprobs)
        num_new = stream.num_tokens - before
        self.usage.completion_tokens += num_new
        self._count(self.usage.completion_tokens)
        ids = tuple(chunk.ids[:num_new]) if self.ask.token_ids else ()
        if not (text.text or text.tokens or text.finish or chunk.prompt_logprobs or ids):
            return None
        return Delta(choice, text.text, text.tokens, text.finish, text.stop_reason, chunk.prompt_logprobs, ids)

    def _finished(self, prompt: int, chunk: Chunk) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._status = "ok"
        elif chunk.finish is None:  # by a stop string, which no engine knows of
            self._generations[prompt].stop(chunk.choice)

    def _count(self, completion_tokens: int) -> None:
        """For the heartbeat; and more is reserved in time when the client has set no end."""
        self.hold.completion_tokens = completion_tokens
        used, tokens = self.hold.used_tokens, self.hold.tokens
        is_short = tokens < self.hold.ceiling and used + TOP_UP_MARGIN > tokens and used >= self._next_top_up
        if is_short and (self._topping_up is None or self._topping_up.done()):
            self._next_top_up = used + TOP_UP_MARGIN  # in debt: not with every token
            self._topping_up = self._inference.top_up(self.hold)


def fingerprint(engine: Engine, model: Model) -> str:
    """OpenAI's system_fingerprint: the same as long as base weights and adapter version are."""
    base = f"{engine.ready.fingerprint}:{engine.ready.quantization}" if engine.ready else ""
    return _fingerprint(base, model.adapter.digest if model.adapter else "")


@lru_cache(1000)
def _fingerprint(base: str, digest: str) -> str:
    return "fp_" + hashlib.sha256(f"{base}:{digest}".encode()).hexdigest()[:12]
