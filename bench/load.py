"""A cheap HTTP/1.1 load generator: keep-alive connections, each with one request under way; counts, latencies, events.

It shares the machine with what it measures, so it parses as little as it can: status, the end of the answer, and how
many `data:` lines came. Without a rate every connection asks again at once. With one, requests become due at random
(Poisson, the same in every run), whatever becomes of earlier ones, and take a free connection, or wait for one: that
counts. What the generator itself is late by, because somebody else had the core, is told apart, as `late`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast


@dataclass
class Result:
    """What came of one run, in seconds."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    events: int = 0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile_ms(self, percent: float) -> float:
        return percentile_ms(self.latencies, percent)

    def as_dict(self) -> dict[str, object]:
        found: dict[str, object] = {
            "requests_per_s": round(self.rate, 1), "p50_ms": self.percentile_ms(50),
            "p99_ms": self.percentile_ms(99), "events_per_s": round(self.events / self.seconds),
            "statuses": self.statuses,
        }  # fmt: skip
        return found | {"late_p99_ms": percentile_ms(self.late, 99)} if self.late else found


def percentile_ms(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] * 1000, 2) if ordered else 0.0


def post(path: str, key: str, body: dict[str, object]) -> bytes:
    """The bytes of a request."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


class _Run:
    """The requests of one run, in turn, and what comes of them."""

    def __init__(self, requests: Sequence[bytes], seconds: float, rate: float | None) -> None:
        self.result = Result()
        self.requests = itertools.cycle(requests)
        self.started = time.perf_counter()
        self.stop_at = self.started + seconds
        self.free: deque[_Connection] = deque()
        self._rate = rate
        self._due: deque[float] = deque()

    def idle(self, connection: _Connection) -> None:
        if time.perf_counter() >= self.stop_at:
            connection.close()
        elif self._rate is None:
            connection.send(time.perf_counter())
        elif self._due:
            connection.send(self._due.popleft())
        else:
            self.free.append(connection)

    async def arrive(self, rate: float) -> None:
        """Sends what is due, until the end."""
        for due in self._arrivals(rate):
            now = time.perf_counter()
            if due > now:
                await asyncio.sleep(due - now)
            now = time.perf_counter()
            self.result.late.append(now - due)
            if self.free:
                self.free.popleft().send(now)
            else:
                self._due.append(now)
        self.stop_at = 0.0  # nothing more becomes due: who comes back now is done
        while self.free:
            self.free.popleft().close()

    def _arrivals(self, rate: float) -> Iterator[float]:
        draw, at = random.Random(0), self.started
        while (at := at + draw.expovariate(rate)) < self.stop_at:
            yield at


class _Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, run: _Run) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._run.idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._run.result.statuses[0] = self._run.result.statuses.get(0, 0) + 1
            self.done.set_result(None)

    def close(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self._transport.close()

    def send(self, since: float) -> None:
        """A request whose time counts from `since`."""
        self._since = since
        self._transport.write(next(self._run.requests))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length: ")
        if at >= 0:
            if len(body) < int(head[at + 16 :].split(b"\r\n", 1)[0]):
                return
        elif not body.endswith(b"0\r\n\r\n"):
            return
        result, status = self._run.result, int(head[9:12])
        result.statuses[status] = result.statuses.get(status, 0) + 1
        result.latencies.append(now - self._since)
        result.events += body.count(b"data: ")
        self._buffer = b""
        self._run.idle(self)


async def load(
    port: int, requests: Sequence[bytes], *, connections: int, seconds: float, rate: float | None = None
) -> Result:
    """As fast as `connections` can, or `rate` requests per second over all of them."""
    run = _Run(requests, seconds, rate)
    connect = asyncio.get_running_loop().create_connection
    made = [await connect(lambda: _Connection(run), "127.0.0.1", port) for _ in range(connections)]
    if rate is not None:
        await run.arrive(rate)
    await asyncio.gather(*(protocol.done for _, protocol in made))
    run.result.seconds = time.perf_counter() - run.started
    return run.result
