"""Inference: the spine. stream() resolves a name, encodes, holds quota, asks an engine, and gives an Answer: deltas of
text, with abort, settlement and the usage entry when it is closed, however it ends. Knows no HTTP.

    model name → Model (last use of a name) → prompt ids → hold → Generate → chunks → text → settle
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from engine.params import SamplingParams
from engine.protocol import EngineError, Generate, Ready
from engine.text import Tokenizer
from gateway.answer import Answer, Ask
from gateway.errors import limited
from gateway.metrics import Metrics
from gateway.models import Model, ModelTable
from gateway.profiles import Profiles
from gateway.prompts import PromptEncoder, too_long
from gateway.replicas import ReplicaSet
from tenants.db import StateUnavailable
from tenants.owners import owner_of
from tenants.quotas import Hold, Quotas, Stale
from tenants.usage import UsageRecord

if TYPE_CHECKING:
    from tenants.keys import Principal

Renew = Callable[[], "Awaitable[Principal]"]
"""Authenticates again, so that nothing cached decides; raises when the key is no longer good."""
Renewed = Callable[[], "Awaitable[tuple[Principal, Model]]"]
UNLIMITED_ESTIMATE = 512
"""Tokens reserved per choice when the client set no max_tokens, and added whenever they are nearly used."""


class Inference:
    """One gateway worker's way to the engines."""

    def __init__(
        self, *, models: ModelTable, replicas: ReplicaSet, quotas: Quotas, metrics: Metrics, encoder: PromptEncoder,
        profiles: Profiles, timeout_s: float,
    ) -> None:  # fmt: skip
        self.models = models
        self.encoder = encoder
        self.profiles = profiles
        self._replicas = replicas
        self._quotas = quotas
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer

    async def dressed(self, principal: Principal, asked: Ask, renew: Renew) -> tuple[Ask, int]:
        """As stream() would ask it, with the model's own system prompt, template and tokenizer; and how many tokens it
        adds to the vocabulary. Raises as stream()."""
        _, found = await self.models.resolve(principal, asked.model, renew)
        model = found.chosen(asked.whose)
        num_added = model.adapter.num_added if model.adapter else 0
        return self.profiles.dress(asked, await self.profiles.of(model)), num_added

    async def stream(self, principal: Principal, asked: Ask, renew: Renew) -> Answer:
        """An answer that an engine has accepted; the caller closes it, always. Everything that can be refused is
        refused here, before anything is charged.

        Raises ModelNotFound, AdapterMismatch, PromptError, ParamsError, QuotaExceeded, EngineError, StateUnavailable,
        and what `renew` raises. Cancelling it leaves nothing behind.
        """
        principal, found = await self.models.resolve(principal, asked.model, renew)
        return await self.begin(principal, found, asked, lambda: self.models.renewed(asked.model, renew))

    async def begin(self, principal: Principal, found: Model, asked: Ask, renewed: Renewed) -> Answer:
        """The same, when it is known whom the name means: `renewed` finds that out again when it may have changed."""
        started = time.monotonic()
        ready = self._replicas.ready()
        attempt = secrets.token_hex(16)
        for is_last_try in (False, True):
            model = found.chosen(asked.whose)
            ask = self.profiles.dress(asked, await self.profiles.of(model))
            own = with_vocabulary(ready, model)
            ask.params.check_vocabulary(own.vocab_size)
            prompts = await self.encoder.encode(ask.prompts, ask.param, own, ask.truncation)
            outputs = [_output_tokens(ask, len(ids), ready) for ids in prompts]
            record = _record(attempt, principal, model, ask, prompts)
            reserved = record.prompt_tokens + ask.params.n * sum(min(n, _estimate(ask, n)) for n in outputs)
            ceiling = record.prompt_tokens + ask.params.n * sum(outputs)
            try:
                hold = await self._quotas.hold(principal, record, reserved, ceiling=ceiling, model=model.target)
                break
            except Stale:
                if is_last_try:
                    raise
                principal, found = await renewed()
        for gate in hold.exceeded:
            self._metrics.add("chorus_limits_let_through", gate.scope, gate.name, gate.mode)
        answer = Answer(self, ask, model, hold, record, started)
        try:
            await answer.start(self._requests(attempt, principal, model, ask, prompts, outputs), self._replicas)
        except BaseException as error:
            answer.failed(error)
            await answer.aclose()
            if isinstance(error, EngineError) and error.code == "lane_full":
                raise limited(error, hold.windows_unused) from error
            raise
        return answer

    def _requests(
        self, attempt: str, principal: Principal, model: Model, ask: Ask, prompts: list[list[int]], outputs: list[int]
    ) -> list[Generate]:
        return [
            Generate(
                id=attempt if len(prompts) == 1 else f"{attempt}-{i}",
                prompt=ids,
                params=_bounded(ask.params, output),
                adapter=model.adapter,
                lane=principal.tenant_id,
                weight=principal.lane_weight,
                priority=principal.priority,
                cache_salt=_salt(principal, ask),
                owner=owner_of(principal.cache_salt, principal.retention_s, time.time()),
                timeout_s=self._timeout_s,
                ephemeral=principal.retention_s == 0,
            )
            for i, (ids, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def finish(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` to its end, whoever is cancelled meanwhile."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def top_up(self, hold: Hold) -> asyncio.Task[None]:
        """Reserve more for an answer that gets longer than was estimated; a refusal lets it go on into debt."""

        async def top_up() -> None:
            with suppress(StateUnavailable):  # settled in the end
                await self._quotas.top_up(hold, UNLIMITED_ESTIMATE)

        return self.finish(top_up())

    def settle(self, hold: Hold, record: UsageRecord) -> asyncio.Future[None]:
        """One entry in the ledger; the same numbers in the metrics. It is on its way, whoever waits for it."""
        self._metrics.add("chorus_attempts", record.status)
        for kind in ("prompt", "cached", "completion"):
            self._metrics.add("chorus_tokens", kind, value=getattr(record, f"{kind}_tokens"))
        if record.first_token_s is not None:
            self._metrics.observe("chorus_first_token_seconds", seconds=record.first_token_s)
        return self._quotas.settling(hold, record)

    async def close(self) -> None:
        """Waits for the settlements under way."""
        while self._closing:
            await asyncio.wait(self._closing)
        self.encoder.close()


def _bounded(params: SamplingParams, output: int) -> SamplingParams:
    return params if params.max_tokens == output else msgspec.structs.replace(params, max_tokens=output)


def with_vocabulary(ready: Ready, model: Model) -> Ready:
    """As the model sees it: with the tokens that its adapter adds."""
    num_added = model.adapter.num_added if model.adapter else 0
    return msgspec.structs.replace(ready, vocab_size=ready.vocab_size + num_added) if num_added else ready


def _output_tokens(ask: Ask, num_prompt: int, ready: Ready) -> int:
    """How many tokens each choice may produce. Raises PromptTooLong when more are asked for than fit."""
    room = ready.max_model_len - num_prompt
    asked = ask.params.max_tokens
    if asked is not None and asked > room and ask.is_limit_soft:
        return room
    if asked is not None and asked > room:
        wanted = f"{num_prompt + asked} tokens ({num_prompt} in the prompt, {asked} of output)"
        raise too_long(ready.max_model_len, wanted, ask.param)
    return room if asked is None else asked


def _salt(principal: Principal, ask: Ask) -> str:
    """A client may divide its tenant's prefix cache further; it never leaves it."""
    return f"{principal.cache_salt}:{ask.cache_salt}" if ask.cache_salt else principal.cache_salt


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
