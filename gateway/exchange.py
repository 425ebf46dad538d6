"""Exchange: one POST /v1/responses under way: what was said before, the right to append to a conversation, the prompt.

open → messages → (the model answers) → keep → close, always
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from engine.protocol import Ready
from gateway import conversations
from gateway.conversations import Conversations, History, Item, Turn
from gateway.errors import ApiError, bad_request
from gateway.items import as_messages, parse_items
from gateway.prompts import Chat, PromptEncoder, PromptTooLong, too_long
from gateway.response_request import NewResponse
from tenants.db import StateUnavailable

Dress = Callable[[Chat], Awaitable[Chat]]
KEEP_S = 10.0
"""How long a finished turn waits for a Redis that is away, before it is given up."""
KEEP_RETRY_S = 0.2
MAX_TURN_S = 3600.0
"""No turn holds its conversation longer, whatever becomes of the task that should end it."""
MIN_OUTPUT_TOKENS = 16


class Exchange:
    """Opened with what was said before; the conversation, if there is one, is held until close()."""

    def __init__(self, store: Conversations, body: NewResponse, input_items: list[Item], turn: Turn | None) -> None:
        self.body = body
        self.input_items = input_items
        self._store = store
        self._turn = turn
        self._history = turn.history if turn else History([])
        self._renewal = asyncio.create_task(self._renew(turn)) if turn else None

    @property
    def is_stored(self) -> bool:
        """As is asked for; nothing of a tenant whose texts are not retained."""
        return self.body.is_stored and self._store.are_kept

    @classmethod
    async def open(cls, store: Conversations, body: NewResponse, ignored: list[str] | None) -> Self:
        """ignored: as parse_items() takes it. Raises ItemError, NotStored, NotKept, ConversationBusy."""
        continues = body.conversation is not None or body.previous_response_id is not None
        if body.input in (None, "", []) and not continues:
            raise bad_request("Missing required parameter: 'input'.", "input", "missing_required_parameter")
        input_items = [] if body.input is None else parse_items(body.input, "input", ignored)
        if body.conversation_id is not None:
            return cls(store, body, input_items, await store.begin(body.conversation_id))
        exchange = cls(store, body, input_items, None)
        if body.previous_response_id is not None:
            exchange._history = await store.chain(body.previous_response_id)
        return exchange

    @property
    def conversation(self) -> str:
        """What stays the same over the whole exchange: the id of the conversation, or of the first item that was ever
        said in a chain of responses."""
        first = next((item["id"] for item in (*self._history.items, *self.input_items) if "id" in item), "")
        return self.body.conversation_id or str(first)

    async def messages(self, encoder: PromptEncoder, ready: Ready, dress: Dress) -> list[dict[str, str]]:
        """The prompt: instructions (of this request alone), what was said before, the input; as much of it as fits once
        `dress` has given it what the model brings along. Raises PromptTooLong."""
        head = [{"role": "system", "content": self.body.instructions}] if self.body.instructions else []
        said = [_for_template(message) for message in as_messages([*self._history.items, *self.input_items])]
        if not said:
            raise bad_request("There is nothing to answer: 'input' is empty.", "input", "missing_required_parameter")
        if self.body.truncation != "auto":
            if self._history.is_cut:
                raise too_long(ready.max_model_len, "a longer conversation", "input")
            return head + said

        async def fits(start: int) -> bool:
            return await _fits(await dress(Chat(messages=head + said[start:])), encoder, ready, room)

        room = ready.max_model_len - (self.body.max_output_tokens or MIN_OUTPUT_TOKENS)
        return head + await _truncated(said, fits)

    async def keep(self, response: dict[str, Any]) -> None:
        """Stores the finished turn; waits for a Redis that is away for a moment. Raises TurnLost, or ApiError 503."""
        deadline = time.monotonic() + KEEP_S
        while True:
            try:
                response["store"] = await self._store.keep(response, self.input_items, self._turn, store=self.is_stored)
                return
            except StateUnavailable as error:
                if time.monotonic() > deadline:
                    # It was generated and is billed: an SDK that tries again by itself would be billed twice.
                    raise ApiError(
                        503, "The response was generated but could not be stored.", "server_error",
                        "response_not_stored", headers={"x-should-retry": "false"},
                    ) from error  # fmt: skip
            await asyncio.sleep(KEEP_RETRY_S)

    async def close(self) -> None:
        """Lets the conversation go; harmless to repeat."""
        if self._turn is None or self._renewal is None:
            return
        self._renewal.cancel()
        self._renewal = None
        with contextlib.suppress(StateUnavailable):  # then its lease runs out
            await self._store.release(self._turn)

    async def _renew(self, turn: Turn) -> None:
        every_s = conversations.TURN_LEASE_S / 3
        for _ in range(int(MAX_TURN_S / every_s)):
            await asyncio.sleep(every_s)
            with contextlib.suppress(StateUnavailable):
                await self._store.renew(turn)


async def _truncated(said: list[dict[str, str]], fits: Callable[[int], Awaitable[bool]]) -> list[dict[str, str]]:
    """All of it if it fits, else the longest tail that does and does not begin with an answer: bisection, since shorter
    tails fit too."""
    if await fits(0):
        return said
    starts = [i for i, message in enumerate(said) if i and message["role"] != "assistant"] or [0]
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return said[starts[low] :]


async def _fits(chat: Chat, encoder: PromptEncoder, ready: Ready, room: int) -> bool:
    try:
        (ids,) = await encoder.encode([chat], "input", ready)
    except PromptTooLong:
        return False
    return len(ids) <= room


def _for_template(message: dict[str, str]) -> dict[str, str]:
    return message | {"role": "system"} if message["role"] == "developer" else message
