"""Sources: looks at every watched source again and again, in one process of all that know it. What the last look came
to is kept in Redis, for every worker to tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any

from adapters.source_book import source_id
from adapters.sources import open_source
from gateway.source_sync import SourceSync
from gateway.state import State
from tenants.db import StateUnavailable
from tenants.lease import Lease
from tenants.state import Client

log = logging.getLogger("chorus.gateway.sources")
KEY = "chorus:sources"
"""Hash of a source's id → what its last look came to, as JSON."""
ASKED = "chorus:sources:asked"
"""Hash of a source's id → how often somebody asked for a look."""
SETTLE_S = 1.0
"""Between the two looks of one that is asked for: what changes in this time waits. Also how soon it begins."""
LEASE_S = 15.0
RENEW_S = LEASE_S / 5


class Sources:
    """`async with Sources(state):` looks at each of the settings' sources every `source_every_s`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Sources:
        places = self._state.settings.adapter_sources
        self._tasks = [asyncio.create_task(_Watch(self._state, place).run()) for place in places]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def last_look(redis: Client, place: str) -> dict[str, Any]:
    """`at` (seconds since 1970), `error` (None = it went well), `asked` (the last wish that is fulfilled), and the
    numbers of source_sync.Look; {} before the first."""
    text = await redis.hget(KEY, source_id(place))
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


async def ask_for_look(redis: Client, place: str) -> int:
    """Has the source looked at soon, and once more a moment later. → the wish's number."""
    return int(await redis.hincrby(ASKED, source_id(place), 1))


class _Watch:
    """One source, in this process."""

    def __init__(self, state: State, place: str) -> None:
        self._state = state
        self._place = place
        self._lease = Lease(state.redis, f"{KEY}:{source_id(place)}", LEASE_S)
        self._sync: SourceSync | None = None
        self._last_error: str | None = None

    async def run(self) -> None:
        every_s = self._state.settings.source_every_s
        while True:
            try:
                if await self._lease.take():
                    await self._while_ours(every_s)
                else:
                    self._sync = None  # another's looks are not ours: two of our own are needed again
                    await asyncio.sleep(min(every_s, LEASE_S))
            except StateUnavailable as error:
                log.debug("sources wait: %s", error)
                await asyncio.sleep(RENEW_S)

    async def _while_ours(self, every_s: float) -> None:
        """Looks, and goes on looking, until the lease is lost."""
        work = asyncio.create_task(self._repeat(every_s))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=RENEW_S)
                if not await self._lease.take():
                    return
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            with contextlib.suppress(StateUnavailable):
                await self._lease.give()

    async def _repeat(self, every_s: float) -> None:
        done = 0
        while True:
            asked = await self._asked()
            if asked != done:
                await self._look(done)
                await asyncio.sleep(SETTLE_S)
            await self._look(asked)
            done = asked
            end = time.monotonic() + every_s
            while (left := end - time.monotonic()) > 0 and await self._asked() == done:  # noqa: ASYNC110 — it is in Redis
                await asyncio.sleep(min(left, SETTLE_S))

    async def _asked(self) -> int:
        return int(await self._state.redis.hget(ASKED, source_id(self._place)) or 0)

    async def _look(self, asked: int) -> None:
        numbers: dict[str, int] = {}
        error = None
        try:
            if self._sync is None:
                self._sync = await asyncio.to_thread(self._open)
            numbers = asdict(await self._sync.look())
        except OSError as fault:
            error = str(fault)[:500]
        except StateUnavailable as fault:
            log.debug("sources wait: %s", fault)
            return
        except Exception as fault:
            log.exception("source %s can't be synced", self._place)
            error = f"our fault: {type(fault).__name__}"
        if error is not None and error != self._last_error:
            log.error("source %s: %s", self._place, error)
        self._last_error = error
        self._state.metrics.add("chorus_source_looks", "error" if error else "ok")
        entry = numbers | {"at": int(time.time()), "error": error, "asked": asked}
        await self._state.redis.hset(KEY, source_id(self._place), json.dumps(entry))

    def _open(self) -> SourceSync:
        settings = self._state.settings
        source = open_source(self._place, settings.aws, settings.private_sources)
        return SourceSync(self._state, self._place, source)
