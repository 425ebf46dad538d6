"""Stream: the answer to one request on its way from the engine: fed by the client's receiver, read by the gateway.
Knows no socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from engine.protocol import Accepted, Broken, Chunk, Failed, Generate, Refused, Unavailable

ACCEPT_TIMEOUT_S = 30.0
RETRY_AFTER_S = 2.0


class Client(Protocol):
    """Whom a stream tells that its request has ended, or is to end."""

    def abort(self, request_id: str) -> None: ...
    def stop(self, request_id: str, choice: int) -> None: ...
    def forget(self, request_id: str) -> None: ...


class Stream:
    """The Generation of one request, fed by the client's receiver."""

    accepted: Accepted

    def __init__(self, client: Client, request: Generate) -> None:
        self.answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._id = request.id
        self._client = client
        self._items: deque[Chunk | Broken | None] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._num_ids = [len(ids) for ids in request.outputs or []] or [0] * request.params.n
        self._num_open = request.params.n
        self._num_seconds = 0.0
        self._is_closed = False

    def put(self, message: Chunk | Accepted | Failed) -> None:
        match message:
            case Accepted():
                if not self.answer.done():
                    self.answer.set_result(message)
            case Failed(code=code, message=text, retry_after_s=retry_after_s, param=param):
                self._client.forget(self._id)
                if self.answer.done():
                    self._put(Broken(code, text, retry_after_s, param))
                else:
                    self.answer.set_exception(Refused(code, text, retry_after_s, param))
            case Chunk(choice=choice, start=start, ids=ids, finish=finish):
                if start != self._num_ids[choice]:
                    self._client.abort(self._id)
                    self._put(Broken("engine_error", "tokens were lost on the way"))
                    return
                self._num_ids[choice] += len(ids)
                self._put(message)
                if finish is not None:
                    self._num_open -= 1
                    if not self._num_open:
                        self._client.forget(self._id)
                        self._put(None)

    def check_time(self, passed_s: float) -> None:
        """So much time has passed since the last check."""
        self._num_seconds += passed_s
        if not self.answer.done() and self._num_seconds > ACCEPT_TIMEOUT_S:
            self.answer.set_exception(Unavailable("engine_error", "the engine did not answer in time", RETRY_AFTER_S))

    def lose(self, why: str) -> None:
        if self.answer.done():
            self._put(Broken("engine_error", why, RETRY_AFTER_S))
        else:
            self.answer.set_exception(Unavailable("engine_error", why, RETRY_AFTER_S))

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_closed:
            raise StopAsyncIteration
        while not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        item = self._items.popleft()
        if isinstance(item, Chunk):
            return item
        self._is_closed = True
        if item is None:
            raise StopAsyncIteration
        raise item

    def ready(self) -> list[Chunk]:
        found = []
        while self._items and isinstance(self._items[0], Chunk):
            found.append(self._items.popleft())
        return found  # type: ignore[return-value]  # mypy does not see through the condition

    def _put(self, item: Chunk | Broken | None) -> None:
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def stop(self, choice: int) -> None:
        self._client.stop(self._id, choice)

    def close(self) -> None:
        self._is_closed = True
        if self.answer.done() and not self.answer.cancelled():
            self.answer.exception()  # it may have failed while nobody waited: that is no surprise to report
        self._client.abort(self._id)
