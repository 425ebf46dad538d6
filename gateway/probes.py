"""Probes: conversations that a version must answer as expected before it becomes current. Checked whole; run on the
real engine, as that version, on the way that requests go. Patterns are matched by RE2, in linear time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import re2
from pydantic import Field, ValidationError

from adapters.spec import AdapterRef
from engine.params import SamplingParams
from engine.protocol import EngineError, Unavailable
from engine.text import PromptError
from gateway.answer import Ask
from gateway.errors import ApiError
from gateway.messages import Body, Message
from gateway.models import Model
from gateway.prompts import Chat
from tenants.principal import Principal

if TYPE_CHECKING:
    from adapters.records import Probes, Stored
    from gateway.inference import Inference
    from tenants.epochs import Epochs
    from tenants.state import Client

MAX_PROBES = 50
MAX_SHOWN = 80
NUM_AT_A_TIME = 4
KEY_ID = "probes"
"""Stands in the usage ledger where a key's id would be."""


class Probe(Body):
    """`expect` is searched in the answer to `messages`, which must have ended within `seconds`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=100)]
    expect: Annotated[str, Field(min_length=1, max_length=1000)]
    seconds: Annotated[float, Field(gt=0, le=120)] = 30.0
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256


@dataclass(frozen=True)
class Failure:
    """Of the probe with this index."""

    index: int
    reason: str


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(422, f"The probes can't be run: {message}", code="probes_invalid", param=param)


def _failed(failures: Sequence[Failure], num_probes: int) -> ApiError:
    told = "; ".join(f"probes[{failure.index}]: {failure.reason}" for failure in failures)
    message = f"{len(failures)} of {num_probes} probes failed, nothing was activated. {told}"
    return ApiError(422, message, code="probes_failed", param=f"probes[{failures[0].index}]")


def parse_probes(data: bytes) -> list[dict[str, Any]]:
    """JSON Lines → as they are stored. Raises ApiError 422 that names the line and field."""
    lines = [line for line in data.splitlines() if line.strip()]
    try:
        values = [orjson.loads(line) for line in lines]
    except orjson.JSONDecodeError:
        raise _invalid("every line must be a JSON object", "probes") from None
    return check_probes(values)


def check_probes(values: Sequence[Any]) -> list[dict[str, Any]]:
    """As they are stored. Raises ApiError 422 that names the line and field."""
    if len(values) > MAX_PROBES:
        raise _invalid(f"there may be at most {MAX_PROBES} probes", "probes")
    return [_checked(index, value) for index, value in enumerate(values)]


def _checked(index: int, value: Any) -> dict[str, Any]:
    place = f"probes[{index}]"
    try:
        probe = Probe.model_validate(value)
        _compiled(probe.expect)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in detail["loc"])[:64]
        raise _invalid(detail["msg"], f"{place}.{name}" if name else place) from None
    except re2.error as error:
        text = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise _invalid(f"it is no pattern of RE2: {text[:200]}", f"{place}.expect") from None
    return probe.model_dump(exclude_none=True)


def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)


class Prober:
    """Runs probes. What they use is in the ledger, as the owner's, with KEY_ID and endpoint "probes"; no limits apply
    to it, and no budget is charged."""

    def __init__(self, inference: Inference, epochs: Epochs, redis: Client) -> None:
        self._inference = inference
        self._epochs = epochs
        self._redis = redis

    async def checked(self, owner: str, name: str, stored: Stored, existing: Probes, is_forced: bool = False) -> Stored:
        """What shall become current, once it has passed its own probes, or those that its name has. Raises as run()."""
        probes = existing if stored.probes is None else stored.probes
        if is_forced and probes:
            return replace(stored, is_forced=True)
        spec = stored.spec
        ref = AdapterRef(stored.digest, spec.rank, spec.packed_bytes, spec.num_added)
        await self.run(Model(name, name, ref, None, owner, companions=stored.companions), probes)
        return stored

    async def run(self, model: Model, probes: Sequence[dict[str, Any]]) -> None:
        """Raises ApiError 422 that tells which failed, Unavailable when there is no engine to ask."""
        places = asyncio.Semaphore(NUM_AT_A_TIME)

        async def one(index: int, probe: Probe) -> Failure | None:
            async with places:
                reason = await self._try(model, probe)
            return None if reason is None else Failure(index, reason)

        found = await asyncio.gather(*(one(i, Probe.model_validate(value)) for i, value in enumerate(probes)))
        failures = [failure for failure in found if failure is not None]
        if failures:
            raise _failed(failures, len(probes))

    async def _try(self, model: Model, probe: Probe) -> str | None:
        """What is wrong; None if it is as expected."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(probe.seconds):
                text = await self._answer(model, probe)
        except TimeoutError:
            return f"it took longer than {probe.seconds:g} s"
        except Unavailable:
            raise
        except (EngineError, PromptError) as error:
            return str(error)
        if time.monotonic() - started > probe.seconds:
            return f"it took longer than {probe.seconds:g} s"
        if _compiled(probe.expect).search(text) is None:
            return f"expected {probe.expect[:MAX_SHOWN]!r}, got {text[:MAX_SHOWN]!r}"
        return None

    async def _answer(self, model: Model, probe: Probe) -> str:
        messages = [message.for_template(index) for index, message in enumerate(probe.messages)]
        ask = Ask(
            model=model.name, prompts=[Chat(messages=messages)], endpoint="probes",
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=probe.max_tokens),
            given=frozenset(("temperature", "seed", "max_tokens")),
        )  # fmt: skip

        async def renewed() -> tuple[Principal, Model]:
            return await self._principal(model.owner), model

        async with await self._inference.begin(*await renewed(), ask, renewed) as answer:
            texts: list[str] = []
            async for deltas in answer:
                texts += [delta.text for delta in deltas]
        return "".join(texts)

    async def _principal(self, owner: str) -> Principal:
        return Principal(
            owner, KEY_ID, frozenset(), cache_salt=KEY_ID, epoch=await self._epochs.get(owner),
            generation=self._redis.generation, retention_s=0,
        )  # fmt: skip
