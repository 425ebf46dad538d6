"""Script: an engine's answers as a test wants them: choices interleaved, logprobs, gates, faults in mid-stream; and
readers of raw event streams."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.protocol import Accepted, Chunk, EngineError, Generate, TokenLogprobs
from tests.gateway.live import EOS, Live


@dataclass
class Script:
    """What the engine does with every request.

    texts       per choice; ends with EOS unless max_tokens cuts it
    gate        chunks wait for it, if set; `accept` the same for Accepted
    fail_after  chunks, then `error` is raised
    sizes       tokens per chunk
    """

    texts: list[str] = field(default_factory=lambda: ["ok"])
    gate: asyncio.Event | None = None
    accept: asyncio.Event | None = None
    fail_after: int | None = None
    error: EngineError | None = None
    size: int = 1
    num_cached: int = 0
    requests: list[Generate] = field(default_factory=list)
    generations: list[ScriptedGeneration] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    aborted_waiting: int = 0

    def install(self, live: Live) -> Script:
        self._tokenizer = live.tokenizer
        live.engine.generate = self.generate  # type: ignore[method-assign, assignment]
        return self

    async def generate(self, request: Generate) -> ScriptedGeneration:
        self.requests.append(request)
        self.started.set()
        if self.accept is not None:
            try:
                await self.accept.wait()
            except asyncio.CancelledError:
                self.aborted_waiting += 1
                raise
        if self.error is not None and self.fail_after is None:
            raise self.error
        ids = [
            [*self._tokenizer.encode_plain(self.texts[choice % len(self.texts)]), EOS][: request.params.max_tokens]
            for choice in range(request.params.n)
        ]
        self.generations.append(ScriptedGeneration(self, request, ids))
        return self.generations[-1]


def entry(token: int, position: int, count: int) -> TokenLogprobs:
    """Position-dependent numbers, so that a mix-up shows; the alternatives begin with the token itself."""
    others = [token, *(i for i in range(100, 130) if i != token)][:count]
    return TokenLogprobs(-0.5 - position, others, [-0.5 - position - i for i in range(len(others))])


class ScriptedGeneration:
    """Chunks of all choices in turn, the last choice first in each round."""

    def __init__(self, script: Script, request: Generate, ids: list[list[int]]) -> None:
        self.accepted = Accepted(request.id, "disk" if request.adapter else "")
        self.num_closed = 0
        self.stopped: list[int] = []
        self._script = script
        self._chunks = self._make(request, ids)
        self._position = 0

    def _make(self, request: Generate, ids: list[list[int]]) -> list[Chunk]:
        size, params, chunks = self._script.size, request.params, []
        for start in range(0, max(map(len, ids)), size):
            for choice in reversed(range(len(ids))):
                part = ids[choice][start : start + size]
                if not part:
                    continue
                is_last = start + size >= len(ids[choice])
                logprobs = prompt_logprobs = None
                if params.logprobs is not None:
                    logprobs = [entry(token, start + i, params.logprobs) for i, token in enumerate(part)]
                if params.prompt_logprobs is not None and choice == 0 and start == 0:
                    count = params.prompt_logprobs
                    prompt_logprobs = [
                        None if i == 0 else entry(token, i, count) for i, token in enumerate(request.prompt)
                    ]
                chunks.append(
                    Chunk(
                        id=request.id, choice=choice, start=start, ids=part,
                        finish=("stop" if part[-1] == EOS else "length") if is_last else None,
                        stop_id=EOS if is_last and part[-1] == EOS else None,
                        num_cached_tokens=self._script.num_cached, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                    )
                )  # fmt: skip
        return chunks

    def __aiter__(self) -> ScriptedGeneration:
        return self

    async def __anext__(self) -> Chunk:
        if self.num_closed or self._position == len(self._chunks):
            raise StopAsyncIteration
        if self._script.gate is not None:
            await self._script.gate.wait()
        if self._script.error is not None and self._position == self._script.fail_after:
            raise self._script.error
        self._position += 1
        return self._chunks[self._position - 1]

    def ready(self) -> list[Chunk]:
        return []

    @property
    def is_finished(self) -> bool:
        return self._position == len(self._chunks)

    def stop(self, choice: int) -> None:
        self.stopped.append(choice)

    def close(self) -> None:
        self.num_closed += 1


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, after checking OpenAI's envelope."""
    assert answer.headers["content-type"] == "application/json", answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    assert len(answer.content) < 10_000
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "None" not in (error["type"], error["param"], error["code"])
    return dict(error)


def frames_of(raw: bytes) -> list[str]:
    """The data of every event; comments are left out, anything else is a fault."""
    assert raw.endswith(b"\n\n")
    events = raw.decode().removesuffix("\n\n").split("\n\n")
    frames = []
    for event in events:
        if event.startswith(":"):
            assert "\n" not in event
            continue
        assert event.startswith("data: ")
        assert "\n" not in event
        frames.append(event.removeprefix("data: "))
    return frames


async def stream_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a whole stream, [DONE] checked and left out."""
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = frames_of(answer.content)
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]
