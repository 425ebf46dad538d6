"""Engine, the seam between gateway and engine; EngineClient, one replica over ZeroMQ. Knows no text and no tenants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from adapters.spec import AdapterRef
from engine.config import ConfigError
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
    Stats,
    ToEngine,
    Unavailable,
    Warm,
)
from engine.stream import RETRY_AFTER_S, Stream

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
MAX_MISSES = 5
"""An engine that has said nothing between so many pings in a row is gone: its streams end with an error. Counted rather
than timed, so that a pause of our own loop, after which its answers are still to be read, is no silence."""
MAX_MESSAGES = 256
"""Read in one turn of the event loop."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(FromEngine)


def check_endpoint(endpoint: str, key: str | None) -> None:
    """Raises ConfigError: a TCP endpoint without a key would let anybody on the network read and write tokens."""
    if endpoint.startswith("ipc://"):
        if len(endpoint.removeprefix("ipc://").encode()) > 107:
            raise ConfigError(f"socket path is longer than the system's 107 bytes: {endpoint}; use a shorter data dir")
    elif endpoint.startswith("tcp://"):
        if not key:
            raise ConfigError(f"{endpoint} needs an engine key (both sides the same): set CHORUS_ENGINE_KEY")
    else:
        raise ConfigError(f"engine endpoint must be ipc://PATH or tcp://HOST:PORT, not {endpoint!r}")


def make_engine_key() -> str:
    """A new secret that engine and gateways share on TCP links (a CURVE secret key in Z85)."""
    return zmq.curve_keypair()[1].decode()


def curve_pair(key: str) -> tuple[bytes, bytes]:
    """(public, secret) of a shared engine key. Raises ConfigError for a malformed one."""
    try:
        return zmq.curve_public(key.encode()), key.encode()
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError("the engine key is not a CURVE secret key (40 characters of Z85)") from error


class Generation(Protocol):
    """An accepted request. Iterating gives its chunks and ends after the last choice has finished; it raises Broken
    when the engine fails in mid-stream. Closing it early aborts it in the engine; closing twice is harmless."""

    accepted: Accepted

    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def __anext__(self) -> Chunk: ...
    def ready(self) -> list[Chunk]:
        """What else has come: not told again by iterating."""
        ...

    def stop(self, choice: int) -> None:
        """A stop string ended this choice: the engine ends it too, and goes on with the others."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """What the gateway needs of an engine. `ready` and `stats` are the last ones heard; None while it is away."""

    @property
    def ready(self) -> Ready | None: ...
    @property
    def stats(self) -> Stats | None: ...
    async def generate(self, request: Generate) -> Generation:
        """Returns when the engine has accepted; raises Refused or Unavailable. Cancelling while waiting aborts."""
        ...

    async def warm(self, adapter: AdapterRef) -> None: ...
    async def evict(self, digest: str) -> None: ...
    async def keep(self, adapters: list[AdapterRef]) -> None:
        """These and no others are to stay in adapter memory."""
        ...

    async def keep_owners(self, owners: list[bytes]) -> None:
        """KV blocks of all others are to be forgotten."""
        ...


class EngineClient:
    """One engine over ZeroMQ: a DEALER whose identity is this worker's boot id.

    start() returns at once; `ready` is set when the engine answers, and again after each of its restarts. Streams end
    with Broken as soon as the connection drops, the engine's boot id changes or it is silent for MAX_MISSES pings.
    """

    def __init__(self, endpoint: str, key: str | None = None) -> None:
        self.endpoint = endpoint
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self._key = key
        self._boot_id = secrets.token_hex(16)
        self._streams: dict[str, Stream] = {}
        self._num_misses = 0
        self._is_due = False
        self._events: asyncio.Queue[zmq.Event] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        check_endpoint(self.endpoint, self._key)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._boot_id.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # while nobody is there, sending fails instead of queueing
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._key:
            public, secret = curve_pair(self._key)
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.curve_serverkey = public
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor: Any = self._socket.get_monitor_socket(events)
        self._socket.connect(self.endpoint)
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.add_reader(self._monitor.FD, self._hear)
        self._hear()  # a descriptor says something only once its socket was found empty
        self._tasks = [asyncio.create_task(run()) for run in (self._ping, self._watch)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lost("the gateway is closing")
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._context.term()

    async def wait_ready(self, timeout_s: float) -> Ready:
        """Raises Unavailable when the engine does not answer in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.ready is None:
                    self._changed.clear()
                    await self._changed.wait()
        if self.ready is None:
            raise Unavailable("engine_error", f"no engine answered within {timeout_s:g} s", RETRY_AFTER_S)
        return self.ready

    async def generate(self, request: Generate) -> Generation:
        """Returns when the engine has accepted; raises Refused or Unavailable. Cancelling while waiting aborts."""
        if self.ready is None:
            raise Unavailable("engine_error", "no engine is connected", RETRY_AFTER_S)
        stream = self._streams[request.id] = Stream(self, request)
        try:
            self._send(request)
            stream.accepted = await stream.answer
        except BaseException:
            stream.close()
            raise
        return stream

    async def warm(self, adapter: AdapterRef) -> None:
        if self.ready is not None:
            self._send(Warm(adapter))

    async def evict(self, digest: str) -> None:
        if self.ready is not None:
            self._send(Evict(digest))

    async def keep(self, adapters: list[AdapterRef]) -> None:
        if self.ready is not None:
            self._send(Keep(adapters))

    async def keep_owners(self, owners: list[bytes]) -> None:
        if self.ready is not None:
            self._send(Owners(owners))

    def abort(self, request_id: str) -> None:
        """Forget the request, and have the engine forget it. Never raises: an engine that is away has forgotten."""
        if self._streams.pop(request_id, None) is not None and self.ready is not None:
            with contextlib.suppress(Unavailable):
                self._send(Abort(request_id))

    def stop(self, request_id: str, choice: int) -> None:
        """One choice is not wanted any more. Never raises."""
        if request_id in self._streams and self.ready is not None:
            with contextlib.suppress(Unavailable):
                self._send(Abort(request_id, choice))

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def _send(self, message: ToEngine) -> None:
        try:
            self._socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unavailable("engine_error", "the engine can't be reached", RETRY_AFTER_S) from error
        self._receive_soon()

    def _receive_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """All that has arrived. Called when the descriptor says so, and after sending: that may have taken in the only
        sign that something is there."""
        self._is_due = False
        for _ in range(MAX_MESSAGES):
            try:
                body: bytes = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing more, or the socket is closed
                return
            self._num_misses = 0
            self._handle(_decoder.decode(body))
        self._receive_soon()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Chunks(chunks=chunks):
                for chunk in chunks:
                    stream = self._streams.get(chunk.id)
                    if stream is not None:
                        stream.put(chunk)
            case Accepted(id=request_id) | Failed(id=request_id):
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.put(message)
            case Ready():
                if self.ready is not None and self.ready.boot_id != message.boot_id:
                    self._lost("the engine has restarted")
                self.ready = message
                self._changed.set()
            case Stats():
                self.stats = message
            case Pong():
                if self.ready is None:  # it was silent so long that we gave it up, and is back
                    self._send(Hello(self._boot_id))

    async def _ping(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                self._send(Ping())
            self._num_misses += 1
            await asyncio.sleep(PING_EVERY_S)
            for stream in list(self._streams.values()):
                stream.check_time(PING_EVERY_S)
            if self.ready is not None and self._num_misses >= MAX_MISSES:
                self._lost("the engine does not answer")

    async def _watch(self) -> None:
        """The connection itself: a killed engine is noticed at once, not after the silence."""
        while True:
            if await self._events.get() == zmq.EVENT_DISCONNECTED:
                await asyncio.sleep(0.05)  # let what had arrived before be read first
                self._lost("the connection to the engine broke")
            else:
                with contextlib.suppress(Unavailable):
                    self._send(Hello(self._boot_id))

    def _hear(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # nothing more
            while True:
                self._events.put_nowait(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])

    def _lost(self, why: str) -> None:
        self.ready = self.stats = None
        for request_id, stream in list(self._streams.items()):
            stream.lose(why)
            with contextlib.suppress(Unavailable):
                self._send(Abort(request_id))  # it may be slow rather than dead
        self._streams.clear()
