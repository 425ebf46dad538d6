"""Line: one connection to Redis for many callers. What they send in one turn of the event loop is one write; answers
come in its order. Knows no key and no script.

A connection that breaks is made anew once, and what had no answer is sent again: every command must bear being done
twice. After a silence of `patience_s` nothing is sent again, and all who wait hear RedisUnavailable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import hiredis
from redis.exceptions import NoScriptError, ResponseError

from tenants.db import StateUnavailable
from tenants.patience import SLICES, Deadline

_REFUSALS = ("OOM", "MISCONF", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "TRYAGAIN", "BUSY")


class RedisUnavailable(StateUnavailable):
    """Redis does not answer, or answers that it can't work."""


def error_of(text: str) -> Exception:
    """What Redis's error means."""
    if text.startswith(_REFUSALS):
        return RedisUnavailable(f"Redis can't work: {text.split()[0]}")
    kind: type[Exception] = NoScriptError if text.startswith("NOSCRIPT") else ResponseError
    return kind(text)


class Line:
    """`connect` gives a connection of redis.asyncio that is ready for commands."""

    def __init__(self, connect: Callable[[], Awaitable[Any]], patience_s: float) -> None:
        self._connect = connect
        self._patience_s = patience_s
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unsent: list[_Command] = []
        self._sent: deque[_Command] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._num_silent = 0

    def send(self, *command: str | int | float | bytes) -> asyncio.Future[Any]:
        """The answer to come. The command is on its way, whoever waits for it. Raises RedisUnavailable,
        NoScriptError, ResponseError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._unsent.append(_Command(hiredis.pack_command(command), answer))  # type: ignore[arg-type]  # a wrong stub
        if len(self._unsent) == 1:
            loop.call_soon(self._flush)
        return answer

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
            self._connecting = None
        self._hang_up("the connection is closed")

    def _flush(self) -> None:
        if not self._unsent:
            return
        if self._wire is None:
            self._connecting = self._connecting or asyncio.get_running_loop().create_task(self._open())
            return
        commands, self._unsent = self._unsent, []
        self._wire.write(b"".join([command.data for command in commands]))
        self._sent.extend(commands)
        if self._watch is None:
            self._num_silent = -1
            self._tick()

    async def _open(self) -> None:
        try:
            async with Deadline(self._patience_s):
                self._wire = _Wire(self, await self._connect())
        except Exception as error:  # noqa: BLE001 - whatever the driver raises, there is no connection
            self._hang_up(type(error).__name__)
        self._connecting = None
        self._flush()

    def _tick(self) -> None:
        """As in patience.Deadline, a pause of our own loop, however long, is one slice of a silence at most."""
        self._watch = None
        self._num_silent += 1
        if self._sent and self._num_silent >= SLICES:
            self._hang_up("it is silent")
        elif self._sent:
            self._watch = asyncio.get_running_loop().call_later(self._patience_s / SLICES, self._tick)

    def _hang_up(self, why: str) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abort()
        commands, self._sent, self._unsent = [*self._sent, *self._unsent], deque(), []
        for command in commands:
            command.fail(why)

    # -- from the wire

    def answered(self, answer: object) -> None:
        self._num_silent = 0
        if self._sent:  # it may have been given up
            self._sent.popleft().take(answer)

    def lost(self, wire: _Wire) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        lost, self._sent = self._sent, deque()
        for command in lost:
            if command.is_repeated:
                command.fail("the connection broke twice")
        again = [command for command in lost if not command.is_repeated]
        for command in again:
            command.is_repeated = True
        self._unsent = again + self._unsent
        self._flush()


class _Command:
    """What was asked, and by whom: they may be gone when the answer comes."""

    __slots__ = ("answer", "data", "is_repeated")

    def __init__(self, data: bytes, answer: asyncio.Future[Any]) -> None:
        self.data = data
        self.answer = answer
        self.is_repeated = False

    def take(self, answer: object) -> None:
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)

    def fail(self, why: str) -> None:
        self.take(RedisUnavailable(f"Redis does not answer: {why}"))


class _Wire(asyncio.Protocol):
    """One connection: the driver has made it and said hello, from then on it is ours."""

    def __init__(self, line: Line, connection: Any) -> None:
        self._line = line
        self._answers = hiredis.Reader(encoding="utf-8", replyError=error_of)
        self._writer, connection._writer, connection._reader = connection._writer, None, None
        self._writer.transport.set_protocol(self)

    def write(self, data: bytes) -> None:
        self._writer.transport.write(data)

    def abort(self) -> None:
        self._writer.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._answers.feed(data)
        try:
            while (answer := self._answers.gets()) is not False:
                if not isinstance(answer, hiredis.PushNotification):
                    self._line.answered(answer)
        except hiredis.ProtocolError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._line.lost(self)
