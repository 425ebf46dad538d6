"""What a worker does beside its requests: heartbeats, retries, sweeps, flushes, repairs. `async with Upkeep(…):`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any

from tenants.epochs import Epochs
from tenants.flusher import UsageFlusher
from tenants.lease import Lease
from tenants.periodic import Periodic, attempt
from tenants.quotas import Quotas
from tenants.slots import UPKEEP
from tenants.state import Client
from tenants.usage import UsageLedger

FLUSH_S = 0.5
REPAIR_S = 1.0
TURN_S = 5.0
"""A worker that swept and flushed has the turn for this long; if it dies, another one takes over."""


class Upkeep:
    """Runs from __aenter__ to __aexit__, which leaves nothing unsettled that a store would take."""

    def __init__(self, redis: Client, quotas: Quotas, ledger: UsageLedger, epochs: Epochs) -> None:
        self._quotas = quotas
        self._ledger = ledger
        self._epochs = epochs
        self._flusher = UsageFlusher(redis, ledger)
        self._turn = Lease(redis, UPKEEP, TURN_S)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Upkeep:
        beat_s = self._quotas.lease_s / 4
        jobs: list[tuple[Callable[[], Awaitable[Any]], float]] = [
            (self._quotas.beat, beat_s), (self._quotas.retry, FLUSH_S), (self._sweep, self._quotas.lease_s / 10),
            (self._flush, FLUSH_S), (self._epochs.repair, REPAIR_S),
        ]  # fmt: skip
        async with AsyncExitStack() as stack:
            for job, every_s in jobs:
                await stack.enter_async_context(Periodic(job, every_s, at_once=True))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        kept = await self._quotas.drain()
        await attempt(partial(self._ledger.add, kept))
        await attempt(self._flusher.flush)

    async def _sweep(self) -> None:
        if await self._turn.take():
            await self._quotas.sweep()

    async def _flush(self) -> None:
        if await self._turn.take():
            await self._flusher.flush()
