"""Periodic: work that a process does again and again beside its requests. Knows nothing of what it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from tenants.db import StateUnavailable

log = logging.getLogger(__name__)


class Periodic:
    """`async with Periodic(work, every_s):` does it every so many seconds. What a store that is away keeps from being
    done waits for the next time; so does any other fault, which is logged: no fault ends it."""

    def __init__(self, work: Callable[[], Awaitable[Any]], every_s: float, *, at_once: bool = False) -> None:
        """at_once: also when it begins."""
        self._work = work
        self._every_s = every_s
        self._at_once = at_once
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        if self._at_once:
            await attempt(self._work)
        while True:
            await asyncio.sleep(self._every_s)
            await attempt(self._work)


async def attempt(work: Callable[[], Awaitable[Any]]) -> None:
    """Does it, unless a store is away or something is wrong with it."""
    try:
        await work()
    except StateUnavailable as error:
        log.debug("%s waits: %s", work, error)
    except Exception:
        log.exception("%s failed and will be tried again", work)
