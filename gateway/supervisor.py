"""Supervisor: Redis, the engine and the gateway workers as child processes of one parent, started in order, kept
running, stopped in order.

    chorus serve
    ├── redis-server       only without --redis-url; Unix socket and append-only file in the data directory
    ├── engine             python -m gateway.child engine
    └── worker 1 … N       python -m gateway.child worker; all accept on one listening socket, which the parent holds:
                           while a worker is being replaced, connections wait instead of being refused; evenly (see
                           acceptor)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import Self, TypeVar

import httpx

from engine.client import EngineClient
from gateway import embedded_redis
from gateway.acceptor import Tally
from gateway.child import READY, Job
from gateway.claims import bind, make_run_dir, only_one
from gateway.processes import Child, Command
from gateway.settings import Settings
from tenants.state import MEMORY_URL

log = logging.getLogger(__name__)
T = TypeVar("T")

READY_POLL_S = 0.1
KILL_AFTER_S = 5.0
"""What a child gets on top of its own time to drain before it is killed."""
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class Supervisor:
    """`async with Supervisor(settings) as supervisor:` starts everything and, at the end, stops everything.

    with_engine = False leaves the engine to somebody else, at settings.engine_endpoints. Raises ConfigError when
    something else holds the port or the data directory. `settings` are those of the children: port, redis_url and
    workers as they came to be.
    """

    def __init__(self, settings: Settings, *, with_engine: bool = True) -> None:
        self.settings = settings
        self._with_engine = with_engine
        self._stack = contextlib.AsyncExitStack()
        self._running: dict[Child, asyncio.Task[None]] = {}
        self._beats: list[Beats] = []

    @property
    def base_url(self) -> str:
        """Of the HTTP API, from this machine."""
        return _url(self.settings.host, self.settings.port)

    @property
    def admin_url(self) -> str:
        """Of the admin API, from this machine."""
        settings = self.settings
        if settings.admin_port is None:
            return self.base_url
        return _url(settings.admin_host or settings.host, settings.admin_port)

    @property
    def children(self) -> list[Child]:
        return list(self._running)

    async def __aenter__(self) -> Self:
        async with self._stack:  # undoes what was done if a later step fails
            make_run_dir(self.settings)
            listener = self._stack.enter_context(contextlib.closing(bind(self.settings)))
            self.settings = self.settings.model_copy(update={"port": listener.getsockname()[1]})
            listeners = [listener, *self._bind_admin()]
            await self._start_redis()
            if self._with_engine:
                await self._start_engine()
            self._start_workers(listeners)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def wait_ready(self) -> None:
        """Returns when a request would be answered, whichever worker gets it: all have heard an engine, and /readyz
        says so. Raises ChildFailed."""
        await self.unless_failing(self._poll_ready())
        for child in self._running:
            child.has_worked = True

    async def unless_failing(self, work: Coroutine[object, object, T]) -> T:
        """The work's result. Raises ChildFailed as soon as a child can't be kept running."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._running.values()], return_when=asyncio.FIRST_COMPLETED)
            for child_task in self._running.values():
                if child_task.done():
                    child_task.result()
            return await task
        finally:
            task.cancel()

    def kill(self) -> None:
        """Ends everything at once."""
        for child in self._running:
            child.signal(signal.SIGKILL)

    async def _poll_ready(self) -> None:
        async with httpx.AsyncClient(timeout=5) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    is_heard = all(beats.say_ready() for beats in self._beats)
                    if is_heard and (await client.get(f"{self.base_url}/readyz")).is_success:
                        return
                await asyncio.sleep(READY_POLL_S)

    async def _start_redis(self) -> None:
        if self.settings.redis_url:
            return
        program = embedded_redis.redis_server()
        if program is None:
            log.warning(embedded_redis.MEMORY_WARNING)
            self.settings = self.settings.model_copy(update={"redis_url": MEMORY_URL, "workers": 1})
            return
        self._stack.enter_context(only_one(self.settings.run_dir / "redis.lock", "Redis of this data directory"))
        redis = Child(Command("redis", embedded_redis.argv(self.settings, program)))
        self._stack.push_async_callback(self._stop, [redis], KILL_AFTER_S)
        self._start(redis)
        await self.unless_failing(embedded_redis.wait_until_up(self.settings))
        self.settings = self.settings.model_copy(update={"redis_url": embedded_redis.url(self.settings)})

    async def _start_engine(self) -> None:
        self._stack.enter_context(only_one(self.settings.run_dir / "engine.lock", "engine of this data directory"))
        client = EngineClient(self.settings.engine_endpoints[0], self.settings.engine_key or None)
        await client.start()
        self._stack.push_async_callback(client.close)
        engine = Child(child_command("engine", Job(role="engine", settings=self.settings)))
        engine.is_alive = lambda: client.ready is not None
        self._stack.push_async_callback(self._stop, [engine], self.settings.drain_s + KILL_AFTER_S)
        self._start(engine)

    def _bind_admin(self) -> list[socket.socket]:
        """The listening socket of the admin port, if there is one."""
        settings = self.settings
        if settings.admin_port is None:
            return []
        place = {"host": settings.admin_host or settings.host, "port": settings.admin_port}
        listener = self._stack.enter_context(contextlib.closing(bind(settings.model_copy(update=place))))
        self.settings = settings.model_copy(update={"admin_port": listener.getsockname()[1]})
        return [listener]

    def _start_workers(self, listeners: list[socket.socket]) -> None:
        fds = [listener.fileno() for listener in listeners]
        tally_fd = Tally.share(self.settings.workers)
        self._stack.callback(os.close, tally_fd)
        workers = [self._worker(number, fds, tally_fd) for number in range(self.settings.workers)]
        self._stack.push_async_callback(self._stop, workers, self.settings.drain_s + KILL_AFTER_S)
        for listener in listeners:
            self._stack.callback(listener.close)  # first of all when stopping: new connections are refused
        for worker in workers:
            self._start(worker)

    def _worker(self, number: int, fds: list[int], tally_fd: int) -> Child:
        beat_r, beat_w = os.pipe()
        self._stack.callback(os.close, beat_r)
        self._stack.callback(os.close, beat_w)
        beats = Beats(beat_r)
        self._beats.append(beats)
        name = "worker" if self.settings.workers == 1 else f"worker {number + 1}"
        admin_fd = fds[1] if len(fds) > 1 else -1
        job = Job(
            role="worker", settings=self.settings, listen_fd=fds[0], admin_fd=admin_fd, beat_fd=beat_w,
            tally_fd=tally_fd, number=number,
        )  # fmt: skip
        worker = Child(child_command(name, job, (*fds, beat_w, tally_fd)))
        worker.is_alive = beats.have_come
        return worker

    def _start(self, child: Child) -> None:
        self._running[child] = asyncio.create_task(child.run(), name=child.name)

    async def _stop(self, children: list[Child], grace_s: float) -> None:
        await asyncio.gather(*(child.stop(grace_s) for child in children))
        tasks = [self._running[child] for child in children if child in self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Beats:
    """What a worker has written to its pipe: that it lives, and whether an engine answers it."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unseen = self._last = b""

    def have_come(self) -> bool:
        """Any since the last time?"""
        self._read()
        unseen, self._unseen = self._unseen, b""
        return bool(unseen)

    def say_ready(self) -> bool:
        self._read()
        return self._last == READY

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._unseen = os.read(self._fd, 4096)
            self._last = self._unseen[-1:]


def _url(host: str, port: int) -> str:
    host = LOCAL.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def child_command(name: str, job: Job, pass_fds: tuple[int, ...] = ()) -> Command:
    """The role is there for whoever reads `ps`."""
    return Command(name, [sys.executable, "-m", "gateway.child", job.role], job.model_dump_json(), pass_fds)
