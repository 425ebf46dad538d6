"""What the gateway costs: Chorus with an engine that answers at once behind the real socket, real Redis, SQLite or
PostgreSQL; keys, limits and ledger on. One line of JSON per measurement.

    python -m bench.gateway [--model DIR] [--workers 2] [--connections 32] [--seconds 10]
                            [--database URL|postgresql] [--soak SECONDS] [--floor REQ_S] [--litellm PATH/TO/litellm]

    plain     non-stream chats of 8 tokens, no two of them equal, as fast as they go
    half      the same at half of the claimed rate (1,500), when they become due and not when others have ended: from
              the request's bytes to the answer's last ones (the engine's own way included)
    direct    the same again to HTTP that answers at once, with no gateway before it
    added     what the gateway adds: half without direct
    own_half  as half, at half of the rate of `plain`; both begin when the ledger has caught up with what came before
    burst     streams of 64 tokens that are there at once: events per second
    stream    five times as many streams of 64 tokens, one every 20 ms: what an event costs that is sent alone
    soak      with --soak, plain chats at a quarter of the rate for so long: memory of the workers, ten times on the way
    litellm   with --litellm: the LiteLLM proxy (master key, no database, no Redis, its production settings) in front of
              an HTTP upstream that answers the same text at once, in turn with Chorus, twice with as many workers as
              Chorus has, and twice with one

--database postgresql makes a server for the run, tuned as that of the tests: it writes without waiting for the disk.

Everything shares the machine, so `cpu_ms` says what each part takes of it for one request (for streams: for one event):
gateway, redis, engine (the stand-in), client (the load generator). `bound` is what the machine's cores could do at
that cost if they did nothing else. --floor makes the exit status 1 when `plain` is below it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

import migrations
from bench.load import Result, load, post
from bench.meter import NUM_CORES, Meter, descendants, rss_mb
from engine.model.config import ModelConfig
from gateway.acceptor import Tally
from gateway.settings import Settings
from tenants.slots import TenantSlot
from tenants.state import connect

DEMO_MODEL = Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct"
ADMIN_KEY = "an-admin-key-for-the-bench"
MESSAGES = [{"role": "user", "content": "Tell me about the sea, in one sentence."}]
NUM_DIFFERENT = 997
TENANT = "bench"
CLAIMED_RATE = 1500
CLIENT_NICE = -10
"""The load generator goes first, as if it were on a machine of its own: else its own waiting would be the tail."""


def work(settings: Settings, listen_fd: int, tally_fd: int, number: int) -> None:
    """One worker process, served as `chorus serve` does it."""
    from gateway.app import create_app
    from gateway.child import serve

    async def beat() -> None: ...

    serve(create_app(settings), settings, [listen_fd], beat, Tally(tally_fd, number))


@contextlib.contextmanager
def child(*command: str, fds: tuple[int, ...] = (), **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    usual = os.getpriority(os.PRIO_PROCESS, 0) == CLIENT_NICE
    process = subprocess.Popen(command, pass_fds=fds, env=os.environ | environment, stdout=subprocess.DEVNULL)
    if usual:
        os.setpriority(os.PRIO_PROCESS, process.pid, 0)
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


@dataclass(frozen=True)
class Served:
    """Something to ask: where, with which key, and the processes of each of its parts."""

    port: int
    key: str
    parts: dict[str, list[int]]
    redis_url: str = ""

    async def ledger_written(self) -> None:
        """Returns when every entry of the ledger is where it belongs."""
        async with contextlib.aclosing(connect(self.redis_url)) as redis:
            while await redis.xlen(TenantSlot(TENANT).usage):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.2)

    def post(self, **more: object) -> list[bytes]:
        """Requests, no two of them equal."""
        asked = MESSAGES[0]["content"]
        bodies = [
            {"model": "bench", "messages": [{"role": "user", "content": f"{asked} Number {i}!"}], **more}
            for i in range(NUM_DIFFERENT)
        ]
        return [post("/v1/chat/completions", self.key, body) for body in bodies]


@contextlib.asynccontextmanager
async def chorus(options: argparse.Namespace, directory: Path, **more: object) -> AsyncIterator[Served]:
    redis = f"{directory}/redis.sock"
    with database(options.database or f"sqlite:///{directory}/chorus.db") as database_url:
        own = {"data_dir": directory, "redis_url": f"unix://{redis}", "database_url": database_url}
        async with _served(options, redis, own | more) as served:
            yield served


@contextlib.contextmanager
def database(wanted: str) -> Iterator[str]:
    """Its URL."""
    if wanted != "postgresql":
        yield wanted
        return
    from tests.services import PostgresServer

    server = PostgresServer()
    try:
        server.start()
        yield server.create()
    finally:
        server.close()


@contextlib.asynccontextmanager
async def _served(options: argparse.Namespace, redis: str, own: dict[str, object]) -> AsyncIterator[Served]:
    flags = {"model": str(options.model), "admin_key": ADMIN_KEY, "pepper": "bench", "served_name": "bench", **own}
    settings = Settings.load(flags, {})
    directory = settings.data_dir
    settings.run_dir.mkdir(exist_ok=True)
    migrations.upgrade(settings.database_url)
    model = ModelConfig.from_dir(settings.model_dir)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, fd = listener.getsockname()[1], listener.fileno()
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        store = stack.enter_context(child("redis-server", "--port", "0", "--unixsocket", redis, "--dir", str(directory),
                                          "--appendonly", "yes", "--save", ""))  # fmt: skip
        engine = stack.enter_context(
            child(sys.executable, "-m", "bench.stand_ins", "engine", settings.engine_endpoints[0],
                  str(model.vocab_size), str(model.max_position))
        )  # fmt: skip
        tally = Tally.share(options.workers)
        stack.callback(os.close, tally)
        command = (sys.executable, "-m", "bench.gateway", "--work", settings.model_dump_json(), "--fds")
        workers = [
            stack.enter_context(child(*command, str(fd), str(tally), str(number), fds=(fd, tally))).pid
            for number in range(options.workers)
        ]
        await answers(port, "/readyz")
        key = await _key(port)
        yield Served(port, key, {"gateway": workers, "redis": [store.pid], "engine": [engine.pid]},
                     f"unix://{redis}")  # fmt: skip


async def _key(port: int) -> str:
    """Of a tenant with every limit, none of which is reached."""
    limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrency": 10**6}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        url = f"http://127.0.0.1:{port}/admin/v1/tenants"
        (await client.post(url, json={"id": TENANT, "limits": limits})).raise_for_status()
        made = await client.post(f"{url}/{TENANT}/keys", json={"name": "bench", "limits": limits})
        made.raise_for_status()
        return str(made.json()["key"])


LITELLM = """
model_list: [{model_name: bench, litellm_params: {model: openai/bench, api_key: x, api_base: "http://127.0.0.1:PORT/v1"}}]
general_settings: {master_key: KEY}
litellm_settings: {request_timeout: 600, set_verbose: false, json_logs: true}
"""


def litellm_version(command: str) -> str:
    code = "from importlib.metadata import version; print(version('litellm'))"
    return subprocess.check_output([Path(command).with_name("python"), "-c", code], text=True).strip()


@contextlib.asynccontextmanager
async def litellm(options: argparse.Namespace, directory: Path, workers: int) -> AsyncIterator[Served]:
    config, key, port = directory / "litellm.yaml", "sk-bench", free_port()
    async with upstream() as bare:
        config.write_text(LITELLM.replace("PORT", str(bare.port)).replace("KEY", key))
        with child(options.litellm, "--config", str(config), "--port", str(port), "--host", "127.0.0.1",
                   "--num_workers", str(workers), LITELLM_MODE="PRODUCTION", LITELLM_LOG="ERROR") as proxy:  # fmt: skip
            await answers(port, "/health/liveliness", key)
            yield Served(port, key, {"gateway": descendants(proxy.pid)} | bare.parts)


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[Served]:
    """HTTP that answers at once."""
    port = free_port()
    with child(sys.executable, "-m", "bench.stand_ins", "upstream", str(port)) as process:
        await answers(port, "/")
        yield Served(port, "none", {"upstream": [process.pid]})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def report(name: str, **values: object) -> None:
    print(json.dumps({"bench": name, **values}), flush=True)


REQUESTS = {
    "burst": {"max_tokens": 64, "stream": True}, "stream": {"max_tokens": 64, "stream": True, "seed": 20},
}  # fmt: skip


async def measured(name: str, served: Served, options: argparse.Namespace, **more: Any) -> Result:
    """One kind of requests, reported with what they cost."""
    meter = Meter(**served.parts)
    pace = {"connections": options.connections, "seconds": options.seconds} | more
    result = await load(served.port, served.post(**REQUESTS.get(name, {"max_tokens": 8})), **pace)
    cpu_ms = meter.per(result.events or len(result.latencies))
    report(name, **result.as_dict(), bound=round(1000 * NUM_CORES / cpu_ms["sum"]), cpu_ms=cpu_ms)
    return result


async def measure(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(chorus(options, Path(name)))
            await load(served.port, served.post(max_tokens=8), connections=options.connections, seconds=2)
            before = rss_mb(served.parts["gateway"])
            full = await measured("plain", served, options)
            await served.ledger_written()
            half = await measured("half", served, options, rate=CLAIMED_RATE / 2)
            async with upstream() as bare:
                direct = await measured("direct", bare, options, rate=CLAIMED_RATE / 2)
            report("added", **{f"p{p}_ms": round(half.percentile_ms(p) - direct.percentile_ms(p), 2) for p in (50, 99)})
            await served.ledger_written()
            await measured("own_half", served, options, rate=full.rate / 2)
            await measured("burst", served, options)
            await measured("stream", served, options, connections=5 * options.connections)
            report("rss", mb_before=before, mb_after=rss_mb(served.parts["gateway"]))
            if options.soak:
                await soak(served, options, full.rate / 4)
            for workers in sorted({options.workers, 1}, reverse=True) if options.litellm else ():
                async with litellm(options, Path(name), workers) as other:
                    await compare(served, other, options, workers)
    return int(full.rate < options.floor)


async def soak(served: Served, options: argparse.Namespace, rate: float) -> None:
    curve, num_requests = [rss_mb(served.parts["gateway"])], 0
    for _ in range(10):
        request = served.post(max_tokens=8)
        part = await load(served.port, request, connections=options.connections, seconds=options.soak / 10, rate=rate)
        num_requests += len(part.latencies)
        curve.append(rss_mb(served.parts["gateway"]))
    report("soak", seconds=options.soak, requests=num_requests, mb=curve)


async def compare(own: Served, other: Served, options: argparse.Namespace, workers: int) -> None:
    """In turn, so that what else the machine does falls on both."""
    await load(other.port, other.post(max_tokens=8), connections=options.connections, seconds=3)
    for _ in range(2):
        theirs = await measured("litellm", other, options)
        ours = await measured("plain", own, options)
        report(
            "ratio", chorus_to_litellm=round(ours.rate / theirs.rate, 1), workers=[options.workers, workers],
            litellm=litellm_version(options.litellm),
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--database", default="")
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--litellm", default="")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fds", type=int, nargs=3, default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Settings.model_validate_json(options.work), *options.fds)
        return 0
    started = time.perf_counter()
    with contextlib.suppress(PermissionError):  # what it starts, it starts at the usual priority: see child()
        os.setpriority(os.PRIO_PROCESS, 0, CLIENT_NICE)
    status = uvloop.run(measure(options))
    report("end", seconds=round(time.perf_counter() - started))
    return status


if __name__ == "__main__":
    sys.exit(main())
