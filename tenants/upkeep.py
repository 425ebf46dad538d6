"""What a worker does beside its requests: heartbeats, retries, sweeps, flushes, repairs. `async with Upkeep(…):`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from tenants.db import StateUnavailable
from tenants.epochs import Epochs
from tenants.flusher import UsageFlusher
from tenants.quotas import Quotas
from tenants.slots import UPKEEP
from tenants.state import Client
from tenants.usage import UsageLedger

log = logging.getLogger(__name__)

FLUSH_S = 0.5
REPAIR_S = 1.0
TURN_S = 5.0
"""A worker that swept and flushed has the turn for this long."""


class Upkeep:
    """Runs from __aenter__ to __aexit__, which leaves nothing unsettled that a store would take."""

    def __init__(self, redis: Client, quotas: Quotas, ledger: UsageLedger, epochs: Epochs) -> None:
        self._redis = redis
        self._quotas = quotas
        self._ledger = ledger
        self._epochs = epochs
        self._flusher = UsageFlusher(redis, ledger)
        self._name = secrets.token_hex(8)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Upkeep:
        beat_s = self._quotas.lease_s / 4
        jobs: list[tuple[Callable[[], Awaitable[Any]], float]] = [
            (self._quotas.beat, beat_s), (self._quotas.retry, FLUSH_S), (self._sweep, self._quotas.lease_s / 10),
            (self._flush, FLUSH_S), (self._epochs.repair, REPAIR_S),
        ]  # fmt: skip
        self._tasks = [asyncio.create_task(self._repeat(job, every_s)) for job, every_s in jobs]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        kept = await self._quotas.drain()
        await self._once(lambda: self._ledger.add(kept))
        await self._once(self._flusher.flush)

    async def _sweep(self) -> None:
        if await self._has_turn():
            await self._quotas.sweep()

    async def _flush(self) -> None:
        if await self._has_turn():
            await self._flusher.flush()

    async def _has_turn(self) -> bool:
        """One worker at a time does what would be wasted twice; if it dies, another one takes over."""
        if await self._redis.set(UPKEEP, self._name, nx=True, px=int(TURN_S * 1000)):
            return True
        if await self._redis.get(UPKEEP) != self._name:
            return False
        await self._redis.pexpire(UPKEEP, int(TURN_S * 1000))
        return True

    async def _repeat(self, job: Callable[[], Awaitable[Any]], every_s: float) -> None:
        while True:
            await self._once(job)
            await asyncio.sleep(every_s)

    async def _once(self, job: Callable[[], Awaitable[Any]]) -> None:
        try:
            await job()
        except StateUnavailable as error:
            log.debug("upkeep waits: %s", error)
        except Exception:
            log.exception("upkeep failed and will be tried again")
