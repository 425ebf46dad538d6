"""Driver: sends timed requests to a core in this process, step by step, and keeps what came when."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from adapters.spec import AdapterRef
from engine.core import EngineCore
from engine.params import SamplingParams
from engine.protocol import Chunk, Generate


@dataclass
class Request:
    """One request of a trace; times in seconds since the epoch of time.perf_counter."""

    num_prompt: int
    num_output: int
    adapter: AdapterRef | None = None
    due_s: float = 0.0
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.token_times[0] - self.sent_at


class Driver:
    """One engine. A request counts from when it was due, though the step under way delays its sending."""

    def __init__(self, core: EngineCore, vocab_size: int, seed: int = 0) -> None:
        self.core = core
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)
        self._open: dict[str, Request] = {}
        self._count = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def send(self, request: Request, at: float | None = None) -> None:
        self._count += 1
        request.sent_at = time.perf_counter() if at is None else at
        self._open[str(self._count)] = request
        prompt = [self._draw.randrange(100, self._vocab_size) for _ in range(request.num_prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
        self.core.add(Generate(id=str(self._count), prompt=prompt, params=params, adapter=request.adapter))

    def step(self) -> None:
        """One step, or a short sleep where nothing can run."""
        chunks = self.core.step()
        now = time.perf_counter()
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise RuntimeError(f"a request failed: {chunk}")
            request = self._open[chunk.id]
            request.token_times += [now] * len(chunk.ids)
            if chunk.finish is not None:
                del self._open[chunk.id]
        if not self.core.can_run:
            self.core.wait(0.002)

    def run(self, requests: Iterable[Request], max_open: int = 1 << 30) -> float:
        """Sends each when it is due, at most `max_open` at a time, until all have ended. → seconds."""
        start = time.perf_counter()
        todo = sorted(requests, key=lambda request: request.due_s)
        todo.reverse()
        while todo or self._open:
            now = time.perf_counter() - start
            while todo and todo[-1].due_s <= now and len(self._open) < max_open:
                request = todo.pop()
                self.send(request, start + request.due_s if request.due_s else None)
            if self._open:
                self.step()
            else:
                time.sleep(min(0.002, todo[-1].due_s - now))
        return time.perf_counter() - start

    def load(self, refs: Iterable[AdapterRef]) -> None:
        """Brings adapters into memory by one short request each."""
        self.run([Request(8, 1, ref) for ref in refs], max_open=64)
