"""ReplicaSet: the engines that answer, and which of them to ask. Knows no tenants and no text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from adapters.spec import AdapterRef
from engine.client import Engine
from engine.protocol import Ready, Unavailable

RETRY_AFTER_S = 2.0


class ReplicaSet:
    """Replicas of one base model."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)

    def ready(self) -> Ready:
        """What the replicas are; the strictest limits of those that answer. Raises Unavailable."""
        found = [engine.ready for engine in self.engines if engine.ready is not None]
        if not found:
            raise Unavailable("unavailable", "The engine is not available, please try again.", RETRY_AFTER_S)
        return min(found, key=lambda ready: ready.max_model_len)

    @property
    def answers(self) -> bool:
        """Any of them."""
        return any(engine.ready is not None for engine in self.engines)

    def choose(self, adapter: AdapterRef | None) -> Engine:
        """The replica that has the adapter resident, then the one with the least to do. Raises Unavailable."""
        self.ready()
        alive = [engine for engine in self.engines if engine.ready is not None]
        return min(alive, key=lambda engine: (not _has(engine, adapter), _load(engine)))

    async def warm(self, adapter: AdapterRef) -> None:
        """Load the adapter soon where most requests for it will go."""
        await self.choose(adapter).warm(adapter)

    async def evict(self, digest: str) -> None:
        for engine in self.engines:
            if engine.ready is not None:
                await engine.evict(digest)

    async def keep(self, adapters: list[AdapterRef]) -> None:
        """Every engine that answers is to have these in memory, and to keep no others."""
        for engine in self.engines:
            if engine.ready is not None:
                with suppress(Unavailable):
                    await engine.keep(adapters)

    async def keep_owners(self, owners: list[bytes]) -> None:
        """Every engine that answers is to forget the KV blocks of all others."""
        for engine in self.engines:
            if engine.ready is not None:
                with suppress(Unavailable):
                    await engine.keep_owners(owners)


def _has(engine: Engine, adapter: AdapterRef | None) -> bool:
    if adapter is None or engine.stats is None:
        return adapter is None
    return any(state.digest == adapter.digest and state.state == "resident" for state in engine.stats.adapters)


def _load(engine: Engine) -> int:
    return engine.stats.running + engine.stats.waiting if engine.stats else 0
