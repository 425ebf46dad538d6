"""The border between gateway and engine over real sockets: EngineClient ↔ Link/Server ↔ EngineCore on a FakeRunner."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from adapters.residency import ResidencyCache
from adapters.spec import AdapterMissing, AdapterRef
from engine.block_pool import BlockPool
from engine.client import MAX_MISSES, EngineClient, check_endpoint, make_engine_key
from engine.config import ConfigError
from engine.core import EngineCore
from engine.lanes import Lanes
from engine.params import SamplingParams
from engine.protocol import Broken, Generate, Ping, Refused, Unavailable
from engine.scheduler import Scheduler, SchedulerConfig
from engine.server import Link, Server
from engine.step import Sampled, Step
from tests.fakes import READY, FakeRunner
from tests.waiting import until

Serve = Callable[..., "Running"]


class SlowRunner(FakeRunner):
    """A FakeRunner that takes `step_s` for a step, waits for leave if there are `leaves`, and fails when told to."""

    def __init__(self, step_s: float) -> None:
        super().__init__(READY.vocab_size)
        self.step_s = step_s
        self.fails = False
        self.leaves: threading.Semaphore | None = None

    def run(self, step: Step) -> list[Sampled]:
        time.sleep(self.step_s)
        if self.leaves is not None:
            self.leaves.acquire(timeout=60)
        if self.fails:
            raise RuntimeError("out of luck")
        return super().run(step)


class Running:
    """An engine in a thread: everything of the engine process but the model."""

    def __init__(self, endpoint: str, key: str | None, step_s: float, boot_id: str) -> None:
        self.runner = SlowRunner(step_s)
        pool = BlockPool(READY.num_blocks, READY.block_size)
        bank = SimpleNamespace(place=lambda digest, host: None, evict=lambda digest: None)

        def fetch(ref: AdapterRef) -> SimpleNamespace:
            if ref.digest.startswith("0"):
                raise AdapterMissing("adapter_missing", "no such adapter")
            return SimpleNamespace(size_bytes=ref.size_bytes)

        residency = ResidencyCache(bank, fetch, 1 << 20)
        config = SchedulerConfig(
            max_model_len=READY.max_model_len,
            vocab_size=READY.vocab_size,
            eos_token_ids=(2,),
            max_num_seqs=8,
            max_batched_tokens=64,
        )
        self.core = EngineCore(Scheduler(config, pool, residency, Lanes()), self.runner, residency, pool)
        self.link = Link(endpoint, key, msgspec.structs.replace(READY, boot_id=boot_id))
        self.server = Server(self.core, READY, self.link, grace_s=5)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.stop()
        self.server.stop()
        self.thread.join(5)
        self.link.close()
        self.core.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[Running] = []

    def start(endpoint: str, key: str | None = None, step_s: float = 0.0, boot_id: str = "one") -> Running:
        running.append(Running(endpoint, key, step_s, boot_id))
        return running[-1]

    yield start
    for each in running:
        each.stop()


@asynccontextmanager
async def connected(endpoint: str, key: str | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, key)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def ask(request_id: str = "r", max_tokens: int = 8, **fields: object) -> Generate:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=int(str(fields.pop("n", 1))))
    return Generate(id=request_id, prompt=[5, 6, 7], params=params, **fields)  # type: ignore[arg-type]


async def test_tokens_come_back_in_order(endpoint: str, serve: Serve) -> None:
    """A request's chunks arrive whole and in order, choices apart, and equal what the model says."""
    running = serve(endpoint)
    async with connected(endpoint) as client:
        await client.wait_ready(30)

        stream = await client.generate(ask(n=2))
        ids: dict[int, list[int]] = {0: [], 1: []}
        async for chunk in stream:
            ids[chunk.choice] += chunk.ids

    expected = [5, 6, 7]
    for _ in range(8):
        expected.append(running.runner.next_token(expected, None))
    assert ids == {0: expected[3:], 1: expected[3:]}


def test_socket_is_private(endpoint: str, serve: Serve) -> None:
    """The socket file can be opened by its owner alone."""
    serve(endpoint)

    mode = stat.S_IMODE(Path(endpoint.removeprefix("ipc://")).stat().st_mode)

    assert mode == 0o600


async def test_refusal_is_known_before_the_stream(endpoint: str, serve: Serve) -> None:
    """Too long a prompt is refused before there is a stream, with its code."""
    serve(endpoint)
    async with connected(endpoint) as client:
        await client.wait_ready(30)

        with pytest.raises(Refused) as caught:
            await client.generate(Generate(id="r", prompt=[5] * 600, params=SamplingParams()))

        assert caught.value.code == "prompt_too_long"


async def test_closing_a_stream_aborts_it(endpoint: str, serve: Serve) -> None:
    """A stream closed early leaves nothing running in the engine, and no stream behind in the client."""
    running = serve(endpoint, step_s=0.005)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(max_tokens=400))
        await anext(stream)

        stream.close()
        stream.close()

        await until(lambda: not running.core.has_work)
        assert not client._streams


async def test_stopping_a_choice(endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that is stopped ends in the engine too; the stream goes on with the others to its end."""
    running = serve(endpoint)
    running.runner.leaves = threading.Semaphore(5)
    abort, stopped = running.core.abort, list[int | None]()

    def noted(request_id: str, choice: int | None = None) -> None:
        stopped.append(choice)
        abort(request_id, choice)

    monkeypatch.setattr(running.core, "abort", noted)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(n=2, max_tokens=60))
        lengths = [0, 0]
        async for chunk in stream:
            lengths[chunk.choice] += len(chunk.ids)
            if chunk.choice == 1 and chunk.start == 3:
                stream.stop(1)
                await until(lambda: running.link.inbox or stopped)
                running.runner.leaves.release(100)

        assert lengths[0] == 60
        assert 3 < lengths[1] < 8
        assert not client._streams


async def test_an_idle_engine_sleeps(endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing is left to do, also after an abort, the step loop waits instead of turning."""
    running = serve(endpoint, step_s=0.005)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(max_tokens=400))
        await anext(stream)
        stream.close()
        await until(lambda: not running.core.has_work)
        turns = 0
        take = running.server._take_messages

        def counted() -> None:
            nonlocal turns
            turns += 1
            take()

        monkeypatch.setattr(running.server, "_take_messages", counted)
        await asyncio.sleep(1)

        assert turns < 20


async def test_cancelled_before_accepted_aborts(endpoint: str, serve: Serve) -> None:
    """A caller that gives up while it waits for the engine's answer leaves nothing behind."""
    running = serve(endpoint, step_s=0.1)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        first = await client.generate(ask("first", max_tokens=400))
        await anext(first)

        task = asyncio.create_task(client.generate(ask("second", max_tokens=400)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        first.close()

        await until(lambda: not running.core.has_work)
        assert not client._streams


async def test_engine_death_breaks_streams_at_once(
    endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the engine goes, streams end with Broken without any limit of silence; a new engine is found again."""
    monkeypatch.setattr("engine.client.MAX_MISSES", 1000)
    running = serve(endpoint, step_s=0.01)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(max_tokens=400))
        await anext(stream)

        for does in ("receive", "send"):
            monkeypatch.setattr(running.link, does, lambda *_: time.sleep(0.01))  # nothing any more
        running.link._stopping.set()
        running.link._thread.join()
        with running.link._lock:
            running.link._context.destroy(linger=0)
        async with asyncio.timeout(60):
            with pytest.raises(Broken):
                async for _ in stream:
                    pass

        with pytest.raises(Unavailable):
            await client.generate(ask("other"))
        serve(endpoint, boot_id="two")
        assert (await client.wait_ready(30)).boot_id == "two"
        chunks = [chunk async for chunk in await client.generate(ask("third", max_tokens=3))]
        assert sum(len(chunk.ids) for chunk in chunks) == 3


async def test_a_pause_of_the_loop_is_no_silence(endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's loop stands still for longer than an engine may be silent: the stream goes on where it was."""
    monkeypatch.setattr("engine.client.PING_EVERY_S", 0.2)
    monkeypatch.setattr("engine.server.WORKER_SILENCE_S", 60.0)
    serve(endpoint, step_s=0.05)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(max_tokens=100))
        await anext(stream)

        time.sleep(0.2 * MAX_MISSES + 1)  # noqa: ASYNC251 — that is the fault

        assert sum([len(chunk.ids) async for chunk in stream]) == 99


async def test_a_pause_that_the_engine_took_for_death(
    endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's loop stood still for so long that the engine gave it up: its streams end with Broken at once, and
    new ones are served."""
    monkeypatch.setattr("engine.server.WORKER_SILENCE_S", 1.0)
    monkeypatch.setattr("engine.client.PING_EVERY_S", 0.2)
    running = serve(endpoint, step_s=0.02)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(max_tokens=500))
        await anext(stream)

        time.sleep(2.5)  # noqa: ASYNC251 — that is the fault

        async with asyncio.timeout(60):
            with pytest.raises(Broken, match="silent"):
                async for _ in stream:
                    pass
        monkeypatch.setattr("engine.server.WORKER_SILENCE_S", 60.0)
        await until(lambda: not running.core.has_work)
        chunks = [chunk async for chunk in await client.generate(ask("next", max_tokens=3))]
        assert sum(len(chunk.ids) for chunk in chunks) == 3


async def test_what_comes_while_we_send_is_read(endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that arrived before a send, in the same turn of a busy loop, is read: the send must not swallow the
    only sign that it is there. (No ping of the client's own comes to the rescue.)"""
    monkeypatch.setattr("engine.client.PING_EVERY_S", 600.0)
    monkeypatch.setattr("engine.server.WORKER_SILENCE_S", 600.0)
    serve(endpoint)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        for i in range(20):
            client._send(Ping())
            time.sleep(0.02)  # noqa: ASYNC251 — the loop is busy while the answer comes
            client._send(Ping())
            async with asyncio.timeout(20):
                await client.generate(ask(str(i), max_tokens=1))


async def test_a_silent_engine_is_given_up(endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connected, but not a word any more: streams end with Broken after so many pings, and it is found again."""
    monkeypatch.setattr("engine.client.PING_EVERY_S", 0.1)
    monkeypatch.setattr("engine.server.STALL_S", 0.0)  # no ping is answered
    monkeypatch.setattr("engine.server.STATS_EVERY_S", 60.0)
    running = serve(endpoint)
    running.runner.leaves = threading.Semaphore(1)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(max_tokens=500))
        with pytest.raises(Broken, match="does not answer"):
            async for _ in stream:
                pass
        assert client.ready is None

        running.runner.leaves.release(1000)
        monkeypatch.setattr("engine.server.STALL_S", 60.0)
        await client.wait_ready(30)


async def test_a_long_step_is_no_silence(endpoint: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings are answered, and a new worker is told that the engine is there, while a step lasts for many of them."""
    monkeypatch.setattr("engine.client.PING_EVERY_S", 0.2)
    monkeypatch.setattr("engine.server.LONG_STEP_S", 0.2)
    running = serve(endpoint)
    running.runner.leaves = threading.Semaphore(1)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask(max_tokens=20))
        await anext(stream)
        await asyncio.sleep(4 * MAX_MISSES * 0.2)

        assert client.ready is not None
        async with connected(endpoint) as other:
            await other.wait_ready(30)
        running.runner.leaves.release(100)
        assert sum([len(chunk.ids) async for chunk in stream]) == 19


async def test_vanished_worker_frees_the_engine(endpoint: str, serve: Serve) -> None:
    """A worker that died without a word has its requests aborted."""
    running = serve(endpoint, step_s=0.02)
    client = EngineClient(endpoint)
    await client.start()
    await client.wait_ready(30)
    await client.generate(ask(max_tokens=500))
    for task in client._tasks:
        task.cancel()  # as kill -9 would: no abort, no goodbye
    client._socket.close(linger=0)
    client._monitor.close(linger=0)

    await until(lambda: not running.core.has_work, timeout_s=60)

    client._context.destroy(linger=0)


async def test_workers_do_not_see_each_other(endpoint: str, serve: Serve) -> None:
    """Two workers get their own chunks only, and one can't abort the other's request."""
    serve(endpoint, step_s=0.005)
    async with connected(endpoint) as one, connected(endpoint) as two:
        await asyncio.gather(one.wait_ready(30), two.wait_ready(30))
        mine = await one.generate(ask("mine", max_tokens=30))
        other = await two.generate(ask("other", max_tokens=30))
        two._streams["mine"] = two._streams["other"]
        two.abort("mine")

        counts = [sum([len(chunk.ids) async for chunk in stream]) for stream in (mine, other)]

        assert counts == [30, 30]


async def test_failing_adapter_fails_its_request_alone(endpoint: str, serve: Serve) -> None:
    """An adapter that can't be fetched ends its own request with its code; others go on."""
    serve(endpoint, step_s=0.002)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        good = await client.generate(ask("good", max_tokens=40, adapter=AdapterRef("a" * 64, 4, 4096)))

        with pytest.raises((Broken, Refused)) as caught:
            async for _ in await client.generate(ask("bad", adapter=AdapterRef("0" * 64, 4, 4096))):
                pass

        assert caught.value.code == "adapter_not_found"
        assert sum([len(chunk.ids) async for chunk in good]) == 40


async def test_tcp_needs_the_key(serve: Serve) -> None:
    """Over TCP the right key gets tokens, a wrong key gets nothing, and no key does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    key = make_engine_key()
    serve(endpoint, key)

    async with connected(endpoint, key) as client:
        await client.wait_ready(30)
        chunks = [chunk async for chunk in await client.generate(ask(max_tokens=3))]
        assert sum(len(chunk.ids) for chunk in chunks) == 3
    async with connected(endpoint, make_engine_key()) as stranger:
        with pytest.raises(Unavailable):
            await stranger.wait_ready(1)
    with pytest.raises(ConfigError):
        check_endpoint(endpoint, None)


async def test_scanner_garbage_is_ignored(serve: Serve) -> None:
    """HT-10: raw bytes, a TLS hello and an HTTP/2 preface on the engine's port harm nobody."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = make_engine_key()
    serve(f"tcp://127.0.0.1:{port}", key)

    for garbage in (b"\x00" * 64, b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 4096):
        with socket.create_connection(("127.0.0.1", port)) as scanner:
            scanner.sendall(garbage)

    async with connected(f"tcp://127.0.0.1:{port}", key) as client:
        await client.wait_ready(30)
        assert [chunk async for chunk in await client.generate(ask(max_tokens=2))]


async def test_drain_finishes_what_runs(endpoint: str, serve: Serve) -> None:
    """A stopping engine refuses new requests and finishes the running ones."""
    running = serve(endpoint)
    running.runner.leaves = threading.Semaphore(1)
    async with connected(endpoint) as client:
        await client.wait_ready(30)
        stream = await client.generate(ask("running", max_tokens=30))
        await anext(stream)
        running.server.stop()

        late = asyncio.create_task(client.generate(ask("late")))
        await until(lambda: running.link.inbox or late.done())
        running.runner.leaves.release(100)
        with pytest.raises(Refused) as caught:
            await late

        assert caught.value.code == "draining"
        assert sum([len(chunk.ids) async for chunk in stream]) == 29


async def test_stats_arrive(endpoint: str, serve: Serve) -> None:
    """The engine's gauges reach every worker within two periods."""
    serve(endpoint)
    async with connected(endpoint) as client:
        await until(lambda: client.stats is not None)

        assert client.stats is not None
        assert client.stats.blocks_total == READY.num_blocks
