"""A cheap HTTP/1.1 load generator: keep-alive connections, each with one request under way; counts, latencies, events.

It shares the machine with what it measures, so it parses as little as it can: status, the end of the answer, and how
many `data:` lines came.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast


@dataclass
class Result:
    """What came of one run. `latencies` in seconds, `gaps` the longest pause between two pieces of each stream."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    events: int = 0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile_ms(self, percent: float) -> float:
        ordered = sorted(self.latencies)
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] * 1000, 2)

    def as_dict(self) -> dict[str, object]:
        return {
            "requests_per_s": round(self.rate, 1), "p50_ms": self.percentile_ms(50), "p99_ms": self.percentile_ms(99),
            "events_per_s": round(self.events / self.seconds), "statuses": self.statuses,
        }  # fmt: skip


def post(path: str, key: str, body: dict[str, object]) -> bytes:
    """The bytes of a request."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


class _Connection(asyncio.Protocol):
    """Sends `request` again and again, until `stop_at`; with `every_s`, not before its time has come."""

    def __init__(self, request: bytes, result: Result, stop_at: float, every_s: float, offset_s: float) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._result = result
        self._stop_at = stop_at
        self._every_s = every_s
        self._due = time.perf_counter() + offset_s
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._result.statuses[0] = self._result.statuses.get(0, 0) + 1
            self.done.set_result(None)

    def _wait(self) -> None:
        now = time.perf_counter()
        if now >= self._stop_at:
            self.done.set_result(None)
            self._transport.close()
        elif self._every_s and self._due > now:
            asyncio.get_running_loop().call_later(self._due - now, self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._started = time.perf_counter()
        self._due = max(self._due + self._every_s, self._started)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
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
        status = int(head[9:12])
        self._result.statuses[status] = self._result.statuses.get(status, 0) + 1
        self._result.latencies.append(time.perf_counter() - self._started)
        self._result.events += body.count(b"data: ")
        self._buffer = b""
        self._wait()


async def load(port: int, request: bytes, *, connections: int, seconds: float, rate: float | None = None) -> Result:
    """As fast as `connections` can, or `rate` requests per second over all of them."""
    result = Result()
    started = time.perf_counter()
    every_s = connections / rate if rate else 0.0
    made = [
        await asyncio.get_running_loop().create_connection(
            lambda i=i: _Connection(request, result, started + seconds, every_s, every_s * i / connections),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        for i in range(connections)
    ]
    await asyncio.gather(*(protocol.done for _, protocol in made))
    result.seconds = time.perf_counter() - started
    return result
