"""Callers of a running server: streams that remember what came when, uploads, and what the offline engine would say."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI

from adapters.spec import AdapterRef
from engine.llm import LLM
from engine.params import SamplingParams
from tests.e2e.process import ChorusProcess

GREEDY = {"temperature": 0.0}
ON = {"ignore_eos": True}


@asynccontextmanager
async def caller(server: ChorusProcess, key: str, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """The unmodified client of a tenant's key."""
    options = {"max_retries": 0, "timeout": 120} | options
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, **options) as client:
        yield client


@dataclass
class Heard:
    """A stream as its client got it."""

    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: str | None = None
    version: str | None = None
    usage: Any = None
    error: openai.APIError | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    async def has(self, num_pieces: int, timeout_s: float = 60.0) -> None:
        """Returns once so many pieces have come."""
        async with asyncio.timeout(timeout_s):
            while len(self.pieces) < num_pieces and self.finish is None:  # noqa: ASYNC110 — any piece may be the one
                await asyncio.sleep(0.005)


async def hear(
    client: AsyncOpenAI, model: str, prompt: Sequence[int] | str, max_tokens: int, heard: Heard, **options: Any
) -> Heard:
    """Streams a greedy completion into `heard`, to its end or its error."""
    raw = await client.completions.with_raw_response.create(
        model=model, prompt=prompt, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True},
        **({"extra_body": ON} | GREEDY | options),
    )  # type: ignore[call-overload]  # fmt: skip
    heard.version = raw.headers.get("x-adapter-version")
    try:
        async for chunk in raw.parse():
            heard.times.append(time.monotonic())
            heard.usage = chunk.usage or heard.usage
            for choice in chunk.choices:
                heard.pieces.append(choice.text)
                heard.finish = choice.finish_reason or heard.finish
    except openai.APIError as error:
        heard.error = error
    except httpx.HTTPError as error:
        heard.error = openai.APIConnectionError(message=str(error), request=httpx.Request("POST", "/"))
    return heard


async def say(client: AsyncOpenAI, model: str, prompt: Sequence[int] | str, max_tokens: int, **options: Any) -> Any:
    """A plain greedy completion."""
    return await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, **({"extra_body": ON} | GREEDY | options)
    )  # type: ignore[call-overload]


def cached(answer: Any) -> int:
    """Prompt tokens that came from the prefix cache."""
    details = answer.usage.prompt_tokens_details
    return details.cached_tokens or 0 if details else 0


def assert_no_gap(streams: Sequence[Heard]) -> None:
    """No pause above 1 s, or ten times the median pause if that is more."""
    gaps = [gap for heard in streams for gap in heard.gaps]
    assert max(gaps) <= max(1.0, 10 * statistics.median(gaps)), f"a gap of {max(gaps):.2f} s"


class Oracle:
    """What the offline engine says, in fp32; tests/engine/test_oracle.py proves that one against transformers."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._refs: dict[Path, AdapterRef] = {}

    def __call__(self, prompt: Sequence[int] | str, max_tokens: int, adapter: Path | None = None) -> str:
        return self.all([prompt], max_tokens, [adapter])[0]

    def all(
        self, prompts: Sequence[Sequence[int] | str], max_tokens: int, adapters: Sequence[Path | None]
    ) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        given = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        outputs = self.llm.generate(given, params, [self.ref(adapter) for adapter in adapters])
        return [output.text for output in outputs]

    def ref(self, adapter: Path | None) -> AdapterRef | None:
        if adapter is None:
            return None
        if adapter not in self._refs:
            self._refs[adapter] = self.llm.add_adapter(adapter)
        return self._refs[adapter]


def files_of(directory: Path) -> dict[str, tuple[str, bytes]]:
    return {
        "config": ("adapter_config.json", (directory / "adapter_config.json").read_bytes()),
        "weights": ("adapter_model.safetensors", (directory / "adapter_model.safetensors").read_bytes()),
    }


async def upload(server: ChorusProcess, tenant: str, name: str, directory: Path) -> httpx.Response:
    return await asyncio.to_thread(
        server.admin, "POST", f"tenants/{tenant}/adapters", files=files_of(directory), data={"name": name}
    )


async def swap(server: ChorusProcess, tenant: str, name: str, directory: Path) -> httpx.Response:
    return await asyncio.to_thread(server.admin, "PUT", f"tenants/{tenant}/adapters/{name}", files=files_of(directory))


async def remove(server: ChorusProcess, tenant: str, name: str) -> httpx.Response:
    return await asyncio.to_thread(server.admin, "DELETE", f"tenants/{tenant}/adapters/{name}")


def gauge(server: ChorusProcess, name: str) -> float:
    """Of the engine, from /metrics; a worker that has just started waits a second for the engine's first word."""
    headers = {"Authorization": f"Bearer {server.admin_key}"}
    for _ in range(50):
        text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=30).text
        found = re.search(rf"^chorus_engine_{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        if found is not None:
            return float(found[1])
        time.sleep(0.1)
    raise AssertionError(text)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Returns once it holds; the condition may block."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 — other processes tell nobody
            await asyncio.sleep(0.05)
