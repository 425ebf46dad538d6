"""Engine, the seam between gateway and engine; EngineClient, one replica over ZeroMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from adapters.spec import AdapterRef
from engine.protocol import Accepted, Chunk, Generate, Ready, Stats


class Generation(Protocol):
    """An accepted request. Iterating gives its chunks and ends after the last choice has finished; it raises Broken
    when the engine fails in mid-stream. Closing it early aborts it in the engine; closing twice is harmless."""

    accepted: Accepted

    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    async def __anext__(self) -> Chunk: ...
    async def aclose(self) -> None: ...


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
