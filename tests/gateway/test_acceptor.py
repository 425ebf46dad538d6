"""Connections over the workers of one socket: evenly, and none is lost because one worker has ended, hangs, or has no
more file descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from gateway import acceptor
from gateway.acceptor import Acceptor, Connections, Tally


class Greeting(asyncio.Protocol):
    """Says who has accepted."""

    def __init__(self, name: bytes, connections: Connections) -> None:
        self._name = name
        self._open = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._open.add(self)
        transport.write(self._name)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)


class Worker:
    """One of several that accept on one socket, all in this process."""

    def __init__(self, name: str, listener: socket.socket, tally: Tally) -> None:
        self.open = Connections(tally)
        self._listener = listener
        self._acceptor = Acceptor(listener, lambda: Greeting(name.encode(), self.open), tally, self.open)

    def close(self) -> None:
        self._acceptor.close()
        self._listener.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def tallies() -> Iterator[Callable[[int], Tally]]:
    fd = Tally.share(2)
    yield lambda number: Tally(fd, number)
    os.close(fd)


@asynccontextmanager
async def connected(listener: socket.socket) -> AsyncIterator[str]:
    """A connection. → the name of who has it."""
    reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
    try:
        async with asyncio.timeout(5):
            yield (await reader.readexactly(1)).decode()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_each_gets_every_other_one(listener: socket.socket, tallies: Callable[[int], Tally]) -> None:
    workers = [Worker(name, listener.dup(), tallies(number)) for number, name in enumerate("ab")]
    try:
        kept = [connected(listener) for _ in range(20)]
        names = [await one.__aenter__() for one in kept]
        assert all(set(pair) == {"a", "b"} for pair in zip(names[::2], names[1::2], strict=True)), names
        for one in kept:
            await one.__aexit__(None, None, None)
    finally:
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("other", ["hangs", "has ended", "has not started"])
async def test_who_has_more_takes_what_nobody_takes(
    listener: socket.socket, tallies: Callable[[int], Tally], other: str
) -> None:
    if other != "has not started":
        tallies(1)
    if other == "has ended":
        tallies(1).leave()
    worker = Worker("a", listener.dup(), tallies(0))
    try:
        kept = [connected(listener) for _ in range(30)]
        assert [await one.__aenter__() for one in kept] == ["a"] * 30
        assert len(worker.open) == 30
        for one in kept:
            await one.__aexit__(None, None, None)
    finally:
        worker.close()


async def test_many_at_once(listener: socket.socket, tallies: Callable[[int], Tally]) -> None:
    """A crowd at the door: everybody is let in, and neither worker gets most of it."""
    workers = [Worker(name, listener.dup(), tallies(number)) for number, name in enumerate("ab")]
    try:
        kept = [connected(listener) for _ in range(100)]
        names = await asyncio.gather(*(one.__aenter__() for one in kept))
        assert abs(names.count("a") - names.count("b")) <= 2 * acceptor.AT_ONCE
        await asyncio.gather(*(one.__aexit__(None, None, None) for one in kept))
    finally:
        for worker in workers:
            worker.close()


class Exhausted(socket.socket):
    """Has no file descriptors for a while."""

    num_refused = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


async def test_without_descriptors_it_pauses_and_goes_on(
    listener: socket.socket, tallies: Callable[[int], Tally], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(acceptor, "EXHAUSTED_S", 0.05)
    exhausted = Exhausted(fileno=os.dup(listener.fileno()))
    worker = Worker("a", exhausted, tallies(0))
    try:
        async with connected(listener) as name:
            assert name == "a"
        assert exhausted.num_refused == 2
        assert caplog.text.count("no connection can be accepted") == 2
    finally:
        worker.close()
