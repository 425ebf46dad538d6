"""How long to wait for a store: Deadline, a time limit for the other side alone; Turns, our own queue in front of it.

They keep what is slow in this process from looking like an outage: a busy event loop, more callers than connections.
Knows no store.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any

SLICES = 8


class Deadline:
    """`async with Deadline(seconds):` as asyncio.timeout(), but a pause of the event loop, however long, counts as one
    of SLICES parts at most: an answer that arrived meanwhile is read before anybody is given up."""

    def __init__(self, seconds: float) -> None:
        self._slice_s = seconds / SLICES
        self._num_left = SLICES
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(self._slice_s, self._tick)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _tick(self) -> None:
        self._num_left -= 1
        if self._num_left:
            self._handle = self._loop.call_later(self._slice_s, self._tick)
        else:
            self._timeout.reschedule(self._loop.time())


async def wait_within(task: asyncio.Future[Any], seconds: float) -> bool:
    """Whether it is done within a Deadline; it goes on if not, and if the caller is cancelled."""
    for _ in range(SLICES):
        done, _pending = await asyncio.wait({task}, timeout=seconds / SLICES)
        if done:
            return True
    return False


class TurnsStopped(Exception):
    """Nobody gets a turn: who holds them found the store away, or has not given one back for too long."""


class Turns:
    """So many callers at a time; the others wait, first come, first served, for as long as turns move.

    `await take()`, then `give()`; `give(has_worked=False)` after an outage ends the wait of all who wait now.
    """

    def __init__(self, number: int, patience_s: float) -> None:
        self._num_free = number
        self._patience_s = patience_s
        self._num_given = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Raises TurnsStopped."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            seen = -1
            while seen != self._num_given:
                seen = self._num_given
                if await wait_within(turn, self._patience_s):
                    return turn.result()
            raise TurnsStopped("none was given back")
        except BaseException:
            self._leave(turn)
            raise

    def give(self, *, has_worked: bool = True) -> None:
        self._num_given += 1
        if not has_worked:
            while self._waiting:
                _settle(self._waiting.popleft(), TurnsStopped("the store is away"))
        while self._waiting:
            if _settle(self._waiting.popleft(), None):
                return
        self._num_free += 1

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self.give()  # it came at the moment when we left


def _settle(turn: asyncio.Future[None], error: TurnsStopped | None) -> bool:
    if turn.done():
        return False
    if error is None:
        turn.set_result(None)
    else:
        turn.set_exception(error)
    return True
