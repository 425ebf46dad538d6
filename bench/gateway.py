"""What the gateway costs: Chorus with an engine that answers at once, real Redis, SQLite or PostgreSQL; keys, limits
and ledger on. One line of JSON per measurement.

    python bench/gateway.py [--model DIR] [--workers 2] [--connections 32] [--seconds 10] [--database URL]
                            [--floor REQ_S] [--litellm PATH/TO/litellm]

    plain     non-stream chats, as fast as they go; cpu_ms of the workers per request
    half      the same at half that rate: the added latency
    stream    streams of 64 tokens: events per second           rss       of the workers, before and after
    litellm   with --litellm: the LiteLLM proxy (master key, no database, no Redis, its production settings) in front of
              an HTTP upstream that answers the same text at once, measured in turn with Chorus

Load generator, gateway, Redis and database share the machine. --floor makes the exit status 1 when `plain` is below it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvloop

import migrations
from bench.load import Result, load, post
from engine.client import Engine
from engine.protocol import Accepted, Chunk, Generate, Ready
from gateway.settings import Settings

DEMO_MODEL = Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct"
ADMIN_KEY = "an-admin-key-for-the-bench"
MESSAGES = [{"role": "user", "content": "Tell me about the sea, in one sentence."}]
UPSTREAM_ANSWER = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "bench",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok " * 8}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 8, "total_tokens": 20},
}  # fmt: skip


class Instant:
    """An engine that answers at once: max_tokens tokens, one chunk each, `delay_s` apart."""

    def __init__(self, vocab_size: int, max_model_len: int, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self.stats = None
        self.ready = Ready(
            boot_id="bench", model="bench", fingerprint="f", max_model_len=max_model_len, vocab_size=vocab_size,
            eos_token_ids=[0], block_size=16, num_blocks=4096, max_num_seqs=1024, max_lora_rank=64,
            adapter_memory_bytes=0, pin_memory_bytes=0, dtype="float32", device="cpu",
        )  # fmt: skip

    async def generate(self, request: Generate) -> InstantGeneration:
        return InstantGeneration(request, self._delay_s)

    async def warm(self, adapter: object) -> None: ...
    async def evict(self, digest: str) -> None: ...


class InstantGeneration:
    """One token per chunk, and per turn of the event loop."""

    def __init__(self, request: Generate, delay_s: float) -> None:
        self._delay_s = delay_s
        self.accepted = Accepted(request.id)
        self._id = request.id
        self._left = self._count = request.params.max_tokens or 1

    def __aiter__(self) -> InstantGeneration:
        return self

    async def __anext__(self) -> Chunk:
        if not self._left:
            raise StopAsyncIteration
        await asyncio.sleep(self._delay_s)
        self._left -= 1
        return Chunk(self._id, 0, self._count - self._left - 1, [500], None if self._left else "length")

    def stop(self, choice: int) -> None: ...
    async def aclose(self) -> None: ...


def work(settings: Settings, listen_fd: int, delay_s: float) -> None:
    """One worker process, served as `chorus serve` does it."""
    from engine.model.config import ModelConfig
    from gateway.app import create_app
    from gateway.child import serve

    async def beat() -> None: ...

    model = ModelConfig.from_dir(settings.model_dir)
    engine: Engine = Instant(model.vocab_size, model.max_position, delay_s)  # type: ignore[assignment]
    serve(create_app(settings, engine), settings, [listen_fd], beat)


@contextlib.contextmanager
def child(*command: str, fds: tuple[int, ...] = (), **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, pass_fds=fds, env=os.environ | environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def answers(port: int, path: str, key: str = "none") -> None:
    """Returns when the server does."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
        for _ in range(1800):
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}{path}")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


@contextlib.asynccontextmanager
async def chorus(options: argparse.Namespace, directory: Path) -> AsyncIterator[tuple[int, str, list[int]]]:
    """→ port, a tenant's key, the workers' process ids."""
    redis = f"{directory}/redis.sock"
    settings = Settings(
        model=str(options.model), data_dir=directory, redis_url=f"unix://{redis}", admin_key=ADMIN_KEY,
        database_url=options.database or f"sqlite:///{directory}/chorus.db", pepper="bench", served_name="bench",
    )  # fmt: skip
    migrations.upgrade(settings.database_url)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, job = listener.getsockname()[1], settings.model_dump_json()
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        stack.enter_context(child("redis-server", "--port", "0", "--unixsocket", redis, "--dir", str(directory),
                                  "--appendonly", "yes", "--save", ""))  # fmt: skip
        command = (sys.executable, "-m", "bench.gateway", "--work", job, "--fd", str(listener.fileno()),
                   "--delay", str(options.delay))  # fmt: skip
        workers = [stack.enter_context(child(*command, fds=(listener.fileno(),))) for _ in range(options.workers)]
        await answers(port, "/livez")
        yield port, await _key(port), [worker.pid for worker in workers]


async def _key(port: int) -> str:
    """Of a tenant with every limit, none of which is reached."""
    limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrency": 10**6}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        url = f"http://127.0.0.1:{port}/admin/v1/tenants"
        (await client.post(url, json={"id": "bench", "limits": limits})).raise_for_status()
        made = await client.post(f"{url}/bench/keys", json={"name": "bench", "limits": limits})
        made.raise_for_status()
        return str(made.json()["key"])


LITELLM = """
model_list: [{model_name: bench, litellm_params: {model: openai/bench, api_key: x, api_base: "http://127.0.0.1:PORT/v1"}}]
general_settings: {master_key: KEY}
litellm_settings: {request_timeout: 600, set_verbose: false, json_logs: true}
"""


@contextlib.asynccontextmanager
async def litellm(options: argparse.Namespace, directory: Path) -> AsyncIterator[tuple[int, str]]:
    """→ port, key. The upstream is one process of this file."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    config = directory / "litellm.yaml"
    config.write_text(LITELLM.replace("PORT", str(ports[0])).replace("KEY", "sk-bench"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(child(sys.executable, "-m", "bench.gateway", "--upstream", str(ports[0])))
        stack.enter_context(
            child(options.litellm, "--config", str(config), "--port", str(ports[1]), "--host", "127.0.0.1",
                  "--num_workers", str(options.workers), LITELLM_MODE="PRODUCTION", LITELLM_LOG="ERROR")
        )  # fmt: skip
        await answers(ports[1], "/health/liveliness", "sk-bench")
        yield ports[1], "sk-bench"


async def upstream(port: int) -> None:
    """HTTP that answers the same text at once."""
    raw = json.dumps(UPSTREAM_ANSWER).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw

    class Server(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            if data.endswith(b"}"):
                self.transport.write(answer)

    await (await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port)).serve_forever()


def rss_mb(pids: list[int]) -> list[int]:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return [count * os.sysconf("SC_PAGE_SIZE") >> 20 for count in pages]


def cpu_s(pids: list[int]) -> float:
    """What the processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")


def report(name: str, **values: object) -> None:
    print(json.dumps({"bench": name, **values}), flush=True)


async def measure(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        async with contextlib.AsyncExitStack() as stack:
            port, key, pids = await stack.enter_async_context(chorus(options, Path(name)))
            plain = post("/v1/chat/completions", key, {"model": "bench", "messages": MESSAGES, "max_tokens": 8})
            stream = post(
                "/v1/chat/completions", key, {"model": "bench", "messages": MESSAGES, "max_tokens": 64, "stream": True}
            )

            async def run(request: bytes, seconds: float = options.seconds, **more: Any) -> Result:
                return await load(port, request, connections=options.connections, seconds=seconds, **more)

            await run(plain, 2)
            before = rss_mb(pids)
            used = cpu_s(pids)
            full = await run(plain)
            cpu_ms = round((cpu_s(pids) - used) / len(full.latencies) * 1000, 3)
            report("plain", workers=options.workers, connections=options.connections, cpu_ms=cpu_ms, **full.as_dict())
            report("half", **(await run(plain, rate=full.rate / 2)).as_dict())
            report("stream", **(await run(stream)).as_dict())
            report("rss", mb_before=before, mb_after=rss_mb(pids))
            if options.litellm:
                await compare(options, Path(name), stack, run, plain)
    return int(full.rate < options.floor)


async def compare(options: argparse.Namespace, directory: Path, stack: Any, run: Any, plain: bytes) -> None:
    port, key = await stack.enter_async_context(litellm(options, directory))
    request = post("/v1/chat/completions", key, {"model": "bench", "messages": MESSAGES, "max_tokens": 8})
    await load(port, request, connections=options.connections, seconds=3)
    for _ in range(2):
        other = await load(port, request, connections=options.connections, seconds=options.seconds)
        own = await run(plain)
        report(
            "litellm",
            **other.as_dict(),
            chorus_requests_per_s=round(own.rate, 1),
            ratio=round(own.rate / other.rate, 1),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--database", default="")
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--litellm", default="")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--delay", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Settings.model_validate_json(options.work), options.fd, options.delay)
        return 0
    if options.upstream:
        uvloop.run(upstream(options.upstream))
    started = time.perf_counter()
    status = uvloop.run(measure(options))
    report("end", seconds=round(time.perf_counter() - started))
    return status


if __name__ == "__main__":
    sys.exit(main())
