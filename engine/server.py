"""The engine process: socket ↔ core. One step loop, which reads the socket itself between its steps; in a step that
lasts, a thread reads for it. Knows no model and no policy.

The thread answers pings, so that a long step does not look like a death; it stops answering when the step loop has not
moved for `STALL_S`. Only the step loop touches the core.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from engine.client import check_endpoint, curve_pair
from engine.config import EngineConfig
from engine.garbage import settle
from engine.protocol import (
    Abort,
    Accepted,
    Chunk,
    Chunks,
    Evict,
    Failed,
    FromEngine,
    Generate,
    Hello,
    Keep,
    Owners,
    Ping,
    Pong,
    Ready,
    Refused,
    ToEngine,
    Warm,
)

if TYPE_CHECKING:
    from engine.core import EngineCore

log = logging.getLogger(__name__)

WORKER_SILENCE_S = 5.0
"""A worker that has not pinged for so long is gone: its requests are aborted."""
STALL_S = 60.0
"""A step loop that has not moved for so long is stuck: pings go unanswered, and workers turn away."""
STATS_EVERY_S = 1.0
LOAD_POLL_S = 0.002
IDLE_POLL_S = 0.25
LONG_STEP_S = 0.5
"""Longer than the step loop waits for messages: then it is in a step, and the thread reads in its place."""
SEND_QUEUE = 100_000
MAX_MESSAGES = 1000
"""Read at a time: whoever sends more does not keep the others' tokens waiting."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ToEngine)


class Link:
    """The ROUTER socket, for whoever holds its lock. `inbox` holds (worker, message), None from a worker that is gone.
    Messages are read and sent by the step loop itself, for another thread would have to be woken for each."""

    def __init__(self, endpoint: str, key: str | None, ready: Ready) -> None:
        check_endpoint(endpoint, key)
        self.inbox: deque[tuple[bytes, ToEngine | None]] = deque()
        self._ready = _encode(ready)
        self._lock = threading.Lock()
        self._moved_at = time.monotonic()
        self._seen: dict[bytes, float] = {}
        self._context = zmq.Context()
        self._auth = self._start_auth(key) if key else None
        self._socket = self._bind(endpoint, key)
        self._poller = select.poll()
        self._poller.register(self._socket.FD, select.POLLIN)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._stand_in, name="engine-link", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float) -> None:
        """Puts what has arrived into the inbox; with nothing in it, waits so long. For the step loop alone."""
        self._moved_at = time.monotonic()
        self._receive_all()
        if timeout_s and not self.inbox:
            self._poller.poll(1000 * timeout_s)  # it says something only once the socket was found empty
            self._receive_all()

    def send(self, worker: bytes, message: FromEngine) -> None:
        body = _encode(message)
        with self._lock:
            self._send(worker, body)

    @property
    def workers(self) -> list[bytes]:
        return list(self._seen)

    def close(self) -> None:
        """Ends the thread, and waits a little until what was sent has left."""
        self._stopping.set()
        self._thread.join(5)
        if self._auth is not None:
            self._auth.stop()
        self._context.destroy(linger=500)

    def _start_auth(self, key: str) -> ThreadAuthenticator:
        public = curve_pair(key)[0]

        class OnlyOurKey:
            def callback(self, domain: str, client_key: bytes) -> bool:
                return secrets.compare_digest(client_key, public)

        auth = ThreadAuthenticator(self._context)
        auth.start()
        auth.configure_curve_callback(credentials_provider=OnlyOurKey())
        return auth

    def _bind(self, endpoint: str, key: str | None) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.router_mandatory = True
        router.router_handover = True  # a worker that reconnects takes over its identity
        router.sndhwm = router.rcvhwm = SEND_QUEUE
        router.linger = 500
        if key:
            router.curve_publickey, router.curve_secretkey = curve_pair(key)
            router.curve_server = True
        mask = os.umask(0o177)
        try:
            router.bind(endpoint)
        finally:
            os.umask(mask)
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                path.chmod(0o600)
        return router

    def _stand_in(self) -> None:
        while not self._stopping.wait(LONG_STEP_S / 2):
            if time.monotonic() - self._moved_at > LONG_STEP_S:
                self._receive_all()

    def _receive_all(self) -> None:
        with self._lock:
            for _ in range(MAX_MESSAGES):
                if not self._receive_one():
                    break
            self._forget_silent()

    def _receive_one(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        worker, body = frames[0], frames[-1]
        try:
            message = _decoder.decode(body)
        except msgspec.DecodeError as error:
            log.warning("dropped a message that is not ours: %s", error)
            return True
        is_new = worker not in self._seen
        self._seen[worker] = time.monotonic()
        if isinstance(message, Hello) or is_new:
            self._send(worker, self._ready)
        if isinstance(message, Ping):
            if time.monotonic() - self._moved_at < STALL_S:
                self._send(worker, _encode(Pong()))
        elif not isinstance(message, Hello):
            self.inbox.append((worker, message))
        return True

    def _send(self, worker: bytes, body: bytes) -> None:
        try:
            self._socket.send_multipart([worker, body], zmq.NOBLOCK)
        except zmq.ZMQError:  # gone, or so slow that its queue is full: either way it lost chunks
            self._drop(worker)

    def _forget_silent(self) -> None:
        limit = time.monotonic() - WORKER_SILENCE_S
        for worker in [worker for worker, seen in self._seen.items() if seen < limit]:
            self._drop(worker)

    def _drop(self, worker: bytes) -> None:
        if self._seen.pop(worker, None) is not None:
            self.inbox.append((worker, None))


@dataclass
class Server:
    """The step loop: messages into the core, the core's chunks to the workers that asked."""

    core: EngineCore
    ready: Ready
    link: Link
    grace_s: float = 30.0
    _owner: dict[str, bytes] = field(default_factory=dict)
    _open: dict[str, int] = field(default_factory=dict)
    _stopped_at: float | None = None
    _stats_at: float = 0.0

    def stop(self) -> None:
        """Drain: refuse new requests, let running ones finish for `grace_s`, then return from run(). Twice: at once."""
        if self._stopped_at is not None:
            self.grace_s = 0.0
        self._stopped_at = time.monotonic()

    def run(self) -> None:
        while not self._has_drained():
            self._take_messages()
            self._deliver(self.core.step() if self.core.has_work else [])
            self._send_stats()
        for request_id in list(self._owner):
            self.core.abort(request_id)
            self._reply(request_id, Failed(request_id, "draining", "the engine stopped before the request ended"))

    def _has_drained(self) -> bool:
        if self._stopped_at is None:
            return False
        return not self._owner or time.monotonic() > self._stopped_at + self.grace_s

    def _take_messages(self) -> None:
        """All that has arrived. Waits when there is nothing to do, or the last step had nothing to run."""
        self.link.receive(IDLE_POLL_S if not self.core.has_work else 0.0 if self.core.can_run else LOAD_POLL_S)
        while self.link.inbox:
            self._handle(*self.link.inbox.popleft())

    def _handle(self, worker: bytes, message: ToEngine | None) -> None:
        match message:
            case None:
                for request_id in [request for request, owner in self._owner.items() if owner == worker]:
                    # It may only have been busy: then it reads this, instead of waiting for tokens that never come.
                    self._reply(request_id, Failed(request_id, "engine_error", "the gateway was silent for too long"))
                    self.core.abort(request_id)
            case Generate():
                self._add(worker, message)
            case Abort(id=request_id, choice=choice):
                if self._owner.get(request_id) == worker:
                    if choice is None:
                        self._forget(request_id)
                    self.core.abort(request_id, choice)
            case Warm(adapter=adapter):
                self.core.warm(adapter)
            case Evict(digest=digest):
                self.core.evict(digest)
            case Keep(adapters=adapters):
                self.core.keep(adapters)
            case Owners(owners=owners):
                self.core.keep_owners(owners)

    def _add(self, worker: bytes, request: Generate) -> None:
        try:
            if self._stopped_at is not None:
                raise Refused("draining", "the engine is about to stop", retry_after_s=1.0)
            accepted: Accepted | Failed = self.core.add(request)
        except Refused as error:
            code = error.code
            accepted = Failed(request.id, code, error.message, error.retry_after_s, error.param)  # type: ignore[arg-type]
        if isinstance(accepted, Accepted):
            self._owner[request.id] = worker
            self._open[request.id] = request.params.n
        self.link.send(worker, accepted)

    def _deliver(self, events: list[Chunk | Failed]) -> None:
        """One Chunks message per worker and step."""
        by_worker: dict[bytes, list[Chunk]] = {}
        for event in events:
            owner = self._owner.get(event.id)
            if owner is None:
                continue
            if isinstance(event, Failed):
                self._reply(event.id, event)
                continue
            by_worker.setdefault(owner, []).append(event)
            if event.finish is not None:
                self._open[event.id] -= 1
                if not self._open[event.id]:
                    self._forget(event.id)
        for worker, chunks in by_worker.items():
            self.link.send(worker, Chunks(chunks))

    def _reply(self, request_id: str, failed: Failed) -> None:
        self.link.send(self._owner[request_id], failed)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._owner.pop(request_id, None)
        self._open.pop(request_id, None)

    def _send_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_at >= STATS_EVERY_S:
            self._stats_at = now
            stats = self.core.stats(self.ready.boot_id)
            for worker in self.link.workers:
                self.link.send(worker, stats)


def run(config: EngineConfig, endpoint: str, key: str | None = None, grace_s: float = 30.0) -> None:
    """The whole life of an engine process: build, bind, serve until SIGTERM or SIGINT, drain.

    endpoint is ipc://PATH (made with mode 0600) or tcp://HOST:PORT, which needs `key`. Raises ConfigError before
    anything is loaded when that can't be. A fault inside a step ends the process: a supervisor starts a clean one.
    """
    check_endpoint(endpoint, key)
    from engine.build import build_core

    core, ready = build_core(config)
    settle()
    link = Link(endpoint, key, ready)
    server = Server(core, ready, link, grace_s)
    with _stop_on_signals(server):
        try:
            server.run()
        except Exception:
            log.exception("a step failed")
            for request_id in list(server._owner):
                server._reply(request_id, Failed(request_id, "engine_error", "the engine failed and is restarting"))
            raise
        finally:
            link.close()
            core.close()


@contextlib.contextmanager
def _stop_on_signals(server: Server) -> Iterator[None]:
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: object) -> None:
        server.stop()

    for number in old:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
