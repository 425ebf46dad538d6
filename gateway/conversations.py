"""Conversations: the state of one tenant's Responses and Conversations in Redis, with a time to live.

Every key carries the tenant in its hash slot, `{t:<tenant>}:…`, so an id means nothing outside its tenant. Items are
JSON objects that this file does not look into. Knows no HTTP and no model.

    ConversationError         has .code (stable, documented) and .message
    ├── NotStored             there is no such response, conversation or item: never was, deleted, or expired
    ├── NotKept               the tenant's texts are not retained, so there is nothing to put them into
    ├── ConversationBusy      another turn is running on this conversation
    └── TurnLost              the conversation changed or went while the turn ran: nothing of it was kept
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from gateway.conversation_store import ConversationStore

Item = dict[str, Any]

TURN_LEASE_S = 15.0
"""A conversation is free again so long after the worker that held it was killed."""
MAX_HISTORY_BYTES = 8 << 20
MAX_HISTORY_TURNS = 4096
ID_PATTERN = re.compile(r"(resp|conv|msg)_[0-9a-f]{48}")


class ConversationError(Exception):
    """Something is wrong with a stored turn or conversation."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class NotStored(ConversationError):
    """No such response, conversation or item of this tenant."""


class NotKept(ConversationError):
    """No texts of this tenant are retained."""


class ConversationBusy(ConversationError):
    """Another turn is running on this conversation."""


class TurnLost(ConversationError):
    """The conversation changed while the turn ran."""


@dataclass(frozen=True)
class StoredResponse:
    """A finished response: the object as it was answered, and the items that were its input, oldest first."""

    response: dict[str, Any]
    input_items: list[Item]


@dataclass(frozen=True)
class Conversation:
    id: str
    created_at: int
    metadata: dict[str, str]


@dataclass(frozen=True)
class Page:
    items: list[Item]
    has_more: bool


@dataclass(frozen=True)
class History:
    """What was said before, oldest first. `is_cut`: older items exist, left out because no model could read them."""

    items: list[Item]
    is_cut: bool = False


@dataclass(frozen=True)
class Turn:
    """The right to append one turn to a conversation, held until commit() or release(), and kept by renew()."""

    conversation_id: str
    token: str
    seq: int
    history: History


def new_id(kind: str) -> str:
    """`kind` (resp, conv, msg) and 192 random bits."""
    return f"{kind}_{secrets.token_hex(24)}"


class Conversations:
    """The stored responses and conversations of one tenant, as a request knows it; made by ConversationStore.of().

    Every method raises RedisUnavailable when Redis is away. Each call may be applied twice (the client repeats one
    whose connection broke); what it says is then the same.
    """

    def __init__(self, store: ConversationStore, tenant: str, ttl_s: int, epoch: int) -> None:
        self._store = store
        self._tenant = tenant
        self._ttl_s = ttl_s
        self._epoch = epoch

    @property
    def are_kept(self) -> bool:
        """False for a tenant whose texts are not retained: nothing is there, and nothing is written."""
        return self._ttl_s > 0

    # -- responses

    async def get_response(self, response_id: str) -> StoredResponse:
        row = await self._read(self._key("resp", response_id), "response", "input")
        if row[0] is None:
            raise NotStored("response_not_found", f"Response with id '{_shown(response_id)}' not found.")
        return StoredResponse(orjson.loads(row[0]), orjson.loads(row[1]))

    async def delete_response(self, response_id: str) -> None:
        if not await self._store.redis.delete(self._key("resp", response_id)):
            raise NotStored("response_not_found", f"Response with id '{_shown(response_id)}' not found.")

    async def chain(self, response_id: str) -> History:
        """Everything said up to and with this response, in one call to Redis. Raises NotStored with code
        `previous_response_not_found`, or `response_chain_broken` if an earlier turn of the chain has been deleted."""
        head = self._key("resp", response_id)
        answer = await self._use("CHAIN", head, self._prefix, MAX_HISTORY_BYTES, MAX_HISTORY_TURNS)
        if answer[0] == "missing":
            if answer[1] == head:
                raise NotStored(
                    "previous_response_not_found", f"Previous response with id '{_shown(response_id)}' not found."
                )
            gone = answer[1].removeprefix(self._prefix).partition(":")[2]
            raise NotStored(
                "response_chain_broken",
                f"Previous response '{response_id}' builds on '{gone}', which has been deleted or has expired.",
            )
        _, lists, is_cut, items = answer
        history = [orjson.loads(text) for text in reversed(items)]
        for text in reversed(lists):
            history.extend(orjson.loads(text))
        return History(history, bool(is_cut))

    async def keep(
        self, response: dict[str, Any], input_items: Sequence[Item], turn: Turn | None, *, store: bool
    ) -> bool:
        """Stores a finished response (if `store`) and appends its turn to the conversation, both or nothing. → whether
        the response is stored: not if the tenant has come to keep no texts meanwhile.

        Raises TurnLost if the conversation is no longer as the turn has read it.
        """
        fields = _fields(response, input_items, turn) if store else []
        keys = [self._key("resp", response["id"])]
        args = [turn.token if turn else "", turn.seq if turn else "", len(fields) // 2, *fields]
        if turn:
            keys.append(self._key("conv", turn.conversation_id))
            args.extend(_flat([*input_items, *response["output"]]))
        elif not store:
            return False
        try:
            outcome = await self._write("COMMIT", keys, *args)
        except NotKept:
            outcome = "missing" if turn else "not kept"
        if outcome not in ("ok", "not kept"):
            raise TurnLost(
                "conversation_changed", "The conversation was changed or deleted while the turn was running."
            )
        return store and outcome == "ok"

    # -- conversations

    async def create(self, metadata: dict[str, str], items: Sequence[Item]) -> Conversation:
        conversation = Conversation(new_id("conv"), int(time.time()), metadata)
        args = [conversation.created_at, orjson.dumps(metadata), *_flat(items)]
        await self._write("CREATE", [self._key("conv", conversation.id)], *args)
        return conversation

    async def get(self, conversation_id: str) -> Conversation:
        row = await self._read(self._key("conv", conversation_id), "created_at", "metadata")
        if row[0] is None:
            raise _no_conversation(conversation_id)
        return Conversation(conversation_id, int(row[0]), orjson.loads(row[1]))

    async def update(self, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        key = self._key("conv", conversation_id)
        created_at = await self._write("UPDATE", [key], orjson.dumps(metadata))
        _check(created_at, conversation_id)
        return Conversation(conversation_id, int(created_at), metadata)

    async def delete(self, conversation_id: str) -> None:
        """Deletes the conversation and its items; raises ConversationBusy while a turn runs."""
        _check(await self._call("DELETE", [self._key("conv", conversation_id)], []), conversation_id)

    async def append(self, conversation_id: str, items: Sequence[Item]) -> None:
        """Adds items at the end; raises ConversationBusy while a turn runs."""
        key = self._key("conv", conversation_id)
        _check(await self._write("APPEND", [key], *_flat(items)), conversation_id)

    async def page(self, conversation_id: str, *, limit: int, order: str, after: str | None) -> Page:
        """`limit` items in `order` (asc = oldest first) that follow the item `after`."""
        key = self._key("conv", conversation_id)
        answer = await self._use("PAGE", key, limit, order, after or "")
        _check(answer[0], conversation_id, after)
        return Page([orjson.loads(text) for text in answer[1] if text is not None], bool(answer[2]))

    async def item(self, conversation_id: str, item_id: str) -> Item:
        (text,) = await self._read(self._key("conv", conversation_id) + ":items", item_id)
        if text is None:
            await self.get(conversation_id)
            raise _no_item(item_id)
        item: Item = orjson.loads(text)
        return item

    async def delete_item(self, conversation_id: str, item_id: str) -> Conversation:
        answer = await self._call("DELETE_ITEM", [self._key("conv", conversation_id)], [item_id])
        _check(answer[0], conversation_id, item_id)
        return Conversation(conversation_id, int(answer[1]), orjson.loads(answer[2]))

    # -- turns

    async def begin(self, conversation_id: str) -> Turn:
        """Takes the conversation for one turn and reads it; raises ConversationBusy if another turn runs."""
        token = secrets.token_hex(16)
        key = self._key("conv", conversation_id)
        answer = await self._use("BEGIN", key, token, int(TURN_LEASE_S * 1000), MAX_HISTORY_BYTES)
        _check(answer[0], conversation_id)
        items = [orjson.loads(text) for text in reversed(answer[2])]
        return Turn(conversation_id, token, answer[1], History(items, bool(answer[3])))

    async def renew(self, turn: Turn) -> None:
        await self._call("HOLD", [self._key("conv", turn.conversation_id)], [turn.token, int(TURN_LEASE_S * 1000)])

    async def release(self, turn: Turn) -> None:
        """Lets the conversation go without a turn; harmless after keep()."""
        await self._call("HOLD", [self._key("conv", turn.conversation_id)], [turn.token, 0])

    # -- the calls

    @property
    def _prefix(self) -> str:
        return f"{{t:{self._tenant}}}:"

    def _key(self, kind: str, object_id: str) -> str:
        """The key of an object; an id that we can't have made leads to a key that is never written."""
        return f"{self._prefix}{kind}:{object_id if ID_PATTERN.fullmatch(object_id) else 'none'}"

    async def _call(self, name: str, keys: list[str], args: list[Any]) -> Any:
        return await self._store.call(name, keys, args)

    async def _read(self, key: str, *fields: str) -> list[Any]:
        return list(await self._store.redis.hmget(key, fields)) if self.are_kept else [None] * len(fields)

    async def _use(self, name: str, key: str, *args: Any) -> Any:
        """What reads, and renews the time to live."""
        if not self.are_kept:
            return ["missing", key]
        return await self._call(name, [key], [self._ttl_s, self._epoch, *args])

    async def _write(self, name: str, keys: list[str], *args: Any) -> Any:
        """Nothing is written for longer than the tenant wants by now. Raises NotKept."""
        while True:
            if not self.are_kept:
                raise NotKept("zero_data_retention", "Conversations are not available: no texts of yours are retained.")
            answer = await self._call(name, keys, [self._ttl_s, self._epoch, *args])
            if answer != "stale":
                return answer
            self._ttl_s, self._epoch = await self._store.keeping(self._tenant)


def _fields(response: dict[str, Any], input_items: Sequence[Item], turn: Turn | None) -> list[Any]:
    values = {
        "response": orjson.dumps(response),
        "input": orjson.dumps(list(input_items)),
        "output": orjson.dumps(response["output"]),
        "previous": response.get("previous_response_id") or "",
        "conversation": turn.conversation_id if turn else "",
        "before": turn.seq if turn else 0,
    }
    return [part for pair in values.items() for part in pair]


def _flat(items: Sequence[Item]) -> list[Any]:
    return [part for item in items for part in (item["id"], orjson.dumps(item))]


def _shown(object_id: str) -> str:
    return object_id[:80]


def _no_conversation(conversation_id: str) -> NotStored:
    return NotStored("conversation_not_found", f"Conversation with id '{_shown(conversation_id)}' not found.")


def _no_item(item_id: str) -> NotStored:
    return NotStored("item_not_found", f"Item with id '{_shown(item_id)}' not found in this conversation.")


def _check(outcome: str, conversation_id: str, item_id: str | None = None) -> None:
    if outcome == "missing":
        raise _no_conversation(conversation_id)
    if outcome == "no_item":
        raise _no_item(item_id or "")
    if outcome == "busy":
        raise ConversationBusy(
            "conversation_locked", "Another turn is running on this conversation. Please retry in a few seconds."
        )
