"""Chunks: what the generations of one answer give, as it comes, each with its generation's index. Knows no text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine.client import Generation
from engine.protocol import Broken, Chunk, EngineError

Indexed = tuple[int, Chunk]
TOO_EARLY = "The engine ended the stream too early."


class Chunks:
    """Take with next(), close in the end."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._num_open = len(generations)
        self._tasks: list[asyncio.Task[None]] = []

    async def next(self) -> list[Indexed]:
        """What has come, at least one. Raises Broken when an engine fails, or when all have ended."""
        if len(self._generations) > 1:
            return [await self._next_of_many()]
        generation = self._generations[0]
        try:
            first = await generation.__anext__()
        except StopAsyncIteration:
            raise Broken("engine_error", TOO_EARLY) from None
        return [(0, first), *((0, chunk) for chunk in generation.ready())]

    @property
    def has_tasks(self) -> bool:
        return bool(self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _next_of_many(self) -> Indexed:
        if not self._tasks:
            self._queue: asyncio.Queue[Indexed | EngineError] = asyncio.Queue()
            self._tasks = [asyncio.create_task(self._read(index)) for index in range(len(self._generations))]
        item = await self._queue.get()
        if isinstance(item, EngineError):
            raise item
        return item

    async def _read(self, index: int) -> None:
        try:
            async for chunk in self._generations[index]:
                self._queue.put_nowait((index, chunk))
        except EngineError as error:
            self._queue.put_nowait(error)
        self._num_open -= 1
        if not self._num_open:
            self._queue.put_nowait(Broken("engine_error", TOO_EARLY))


def joined(found: list[Indexed]) -> list[Indexed]:
    """The same tokens in fewer chunks, for who takes the whole anyway. What says more than ids stays by itself."""
    if len(found) == 1:
        return found
    parts: list[tuple[int, Chunk, list[int]]] = []
    for index, chunk in found:
        if parts and parts[-1][0] == index and _follows(parts[-1][1], chunk):
            _, last, ids = parts[-1]
            ids += chunk.ids
            parts[-1] = index, msgspec.structs.replace(last, ids=ids, finish=chunk.finish), ids
        else:
            parts.append((index, chunk, [*chunk.ids]))
    return [(index, chunk) for index, chunk, _ in parts]


def _follows(last: Chunk, chunk: Chunk) -> bool:
    says_more = chunk.stop_id is not None or chunk.logprobs is not None or chunk.prompt_logprobs is not None
    return last.choice == chunk.choice and last.finish is None and last.logprobs is None and not says_more
