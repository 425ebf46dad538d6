"""Does the gateway stay quick while somebody sends it the worst? Chorus as in bench/gateway.py with one worker; one
stream of a token every 20 ms runs, /livez is asked every 50 ms, and meanwhile come, one after the other:

    a body of 25 MB with and without Content-Length, 10^6 messages, 10^6 token ids, a prompt of 4 MB, nesting of 10^5,
    bytes that are no UTF-8, NaN, a lone surrogate, 10^5 biases, 200 connections that send their headers slowly,
    TLS and HTTP/2 and noise

    python -m bench.robust [--model DIR]

One line of JSON each: statuses, the time to the answer, the size of the largest error, the longest wait for /livez and
the longest gap in the stream. Exit status 1 when an answer is no 4xx, an error is 10 kB or more, /livez took 200 ms or
more, or the stream stood still for 500 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.gateway import DEMO_MODEL, MESSAGES, chorus, report

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EVERY_S = 0.05


@dataclass
class Watch:
    """The longest waits since the last look."""

    livez_s: float = 0.0
    gap_s: float = 0.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def livez(self, port: int) -> None:
        while True:
            started = time.perf_counter()
            await exchange(port, [b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"])
            self.livez_s = max(self.livez_s, time.perf_counter() - started)
            await asyncio.sleep(EVERY_S)

    async def stream(self, port: int, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await reader.read(65536)
        last = time.perf_counter()
        while await reader.read(65536):
            now = time.perf_counter()
            self.gap_s, last = max(self.gap_s, now - last), now


async def exchange(port: int, pieces: Iterable[bytes], pause_s: float = 0.0) -> bytes:
    """Sends the pieces and reads to the end of the connection, or 30 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def read() -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                answer.extend(data)

    reading = asyncio.create_task(read())
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(30):
            for piece in pieces:
                if reading.done():
                    break
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            await reading
    reading.cancel()
    writer.close()
    return bytes(answer)


def head(key: str, path: str, more: str) -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    return f"{lines}connection: close\r\n{more}\r\n\r\n".encode()


def whole(key: str, path: str, body: bytes) -> list[bytes]:
    return [head(key, path, f"content-length: {len(body)}"), body]


def chunked(key: str, path: str, body: bytes) -> list[bytes]:
    parts = [body[i : i + 65536] for i in range(0, len(body), 65536)]
    return [
        head(key, path, "transfer-encoding: chunked"),
        *(b"%x\r\n%s\r\n" % (len(p), p) for p in parts),
        b"0\r\n\r\n",
    ]


def attacks(key: str) -> dict[str, list[bytes]]:
    one = b'{"role":"user","content":"a"},'
    many = b'{"model":"bench","messages":[' + one * 10**6 + b"{}]}"
    few = b'{"model":"bench","messages":[' + one * 30_000 + b'{"role":"user","content":"a"}]}'
    ids = b'{"model":"bench","prompt":[' + b"1," * 10**6 + b"1]}"
    text = json.dumps({"model": "bench", "prompt": "sea " * 10**6}).encode()
    bias = json.dumps(
        {"model": "bench", "messages": MESSAGES, "logit_bias": {str(i): 1 for i in range(10**5)}}
    ).encode()
    chat = b'{"model":"bench","messages":[{"role":"user","content":%s}]}'
    return {
        "25 MB": whole(key, CHAT, b"x" * 25_000_000), "25 MB chunked": chunked(key, CHAT, b'"' + b"x" * 25_000_000),
        "10^6 messages": whole(key, CHAT, many), "30,000 messages": whole(key, CHAT, few),
        "10^6 ids": whole(key, TEXT, ids), "4 MB of text": whole(key, TEXT, text),
        "nesting": whole(key, CHAT, chat % (b"[" * 10**5)), "no UTF-8": whole(key, CHAT, chat % b'"\xff\xfe"'),
        "NaN": whole(key, CHAT, b'{"model":"bench","temperature":NaN}'),
        "surrogate": whole(key, CHAT, chat % b'"\\ud800"'),
        "10^5 biases": whole(key, CHAT, bias), "TLS": [bytes.fromhex("16030100c5010000c10303") + b"\0" * 190],
        "HTTP/2": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], "noise": [b"\0\1\2\3" * 1000],
        "1 MB header": [b"GET /livez HTTP/1.1\r\nx: " + b"y" * 10**6 + b"\r\n\r\n"],
    }  # fmt: skip


def is_bad(values: dict[str, object]) -> bool:
    statuses = values["statuses"]
    assert isinstance(statuses, list)
    return (
        not all(400 <= status < 500 for status in statuses) or int(str(values["error_bytes"])) >= 10_000
        or float(str(values["livez_ms"])) >= 200 or float(str(values["gap_ms"])) >= 500
    )  # fmt: skip


async def attack(port: int, watch: Watch, pieces: list[bytes], times: int) -> dict[str, object]:
    watch.livez_s = watch.gap_s = 0.0
    started = time.perf_counter()
    answers = await asyncio.gather(*(exchange(port, pieces) for _ in range(times)))
    took_s = time.perf_counter() - started
    await asyncio.sleep(2 * EVERY_S)
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers]
    return {
        "ms": round(took_s * 1000), "statuses": sorted({int(answer[9:12] or 0) for answer in answers}),
        "error_bytes": max(map(len, bodies)),
        "livez_ms": round(watch.livez_s * 1000), "gap_ms": round(watch.gap_s * 1000),
    }  # fmt: skip


async def measure(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        async with chorus(options, Path(name)) as served:
            port, watch, is_failed, worst = served.port, Watch(), False, attacks(served.key)
            endless = served.post(max_tokens=8000, stream=True, seed=20)[0]
            watch.tasks = [asyncio.create_task(watch.livez(port)), asyncio.create_task(watch.stream(port, endless))]
            await asyncio.sleep(1)
            slow = asyncio.gather(
                *(exchange(port, [b"GET /livez HTTP/1.1\r\n"] + [b"a: b\r\n"] * 30, 1) for _ in range(200))
            )
            for what, pieces in worst.items():
                values = await attack(port, watch, pieces, options.times)
                report(what, **values)
                is_failed |= is_bad(values)
            answers = await slow
            report("slow headers", statuses=sorted({int(answer[9:12] or 0) for answer in answers}))
            for task in watch.tasks:
                task.cancel()
    return int(is_failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--times", type=int, default=2, help="so many of each at once")
    parser.set_defaults(database="", workers=1)
    return uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
