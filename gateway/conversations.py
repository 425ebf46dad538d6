"""ConversationStore: the state of the Responses and Conversations APIs in Redis, per tenant, with a time to live.

Every key carries the tenant in its hash slot, `{t:<tenant>}:…`, so an id means nothing outside its tenant. Items are
JSON objects that this file does not look into. Knows no HTTP and no model.

    ConversationError         has .code (stable, documented) and .message
    ├── NotStored             there is no such response, conversation or item: never was, deleted, or expired
    ├── ConversationBusy      another turn is running on this conversation
    └── TurnLost              the conversation changed or went while the turn ran: nothing of it was kept
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway import conversation_scripts as scripts
from tenants.state import Client

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


class ConversationStore:
    """Stored responses and conversations. Every method raises RedisUnavailable when Redis is away.

    Each call may be applied twice (the client repeats one whose connection broke); what it says is then the same.
    """

    def __init__(self, redis: Client, ttl_s: int) -> None:
        self._redis = redis
        self._ttl_s = ttl_s
        self._scripts = {
            name: redis.register_script(getattr(scripts, name))
            for name in (
                "CREATE",
                "APPEND",
                "UPDATE",
                "DELETE",
                "DELETE_ITEM",
                "PAGE",
                "BEGIN",
                "HOLD",
                "COMMIT",
                "CHAIN",
            )
        }

    async def erase(self, tenant: str) -> int:
        """Deletes every response and conversation of a tenant. → how many keys. Takes time: it looks at all keys."""
        num_erased = 0
        for kind in ("resp", "conv"):
            async for key in self._redis.scan_iter(f"{_prefix(tenant)}{kind}:*", count=1000):
                num_erased += await self._redis.unlink(key)
        return num_erased

    # -- responses

    async def get_response(self, tenant: str, response_id: str) -> StoredResponse:
        row = await self._redis.hmget(_key(tenant, "resp", response_id), ["response", "input"])
        if row[0] is None:
            raise NotStored("response_not_found", f"Response with id '{_shown(response_id)}' not found.")
        return StoredResponse(orjson.loads(row[0]), orjson.loads(row[1]))

    async def delete_response(self, tenant: str, response_id: str) -> None:
        if not await self._redis.delete(_key(tenant, "resp", response_id)):
            raise NotStored("response_not_found", f"Response with id '{_shown(response_id)}' not found.")

    async def chain(self, tenant: str, response_id: str) -> History:
        """Everything said up to and with this response, in one call to Redis. Raises NotStored with code
        `previous_response_not_found`, or `response_chain_broken` if an earlier turn of the chain has been deleted."""
        head = _key(tenant, "resp", response_id)
        args = [self._ttl_s, _prefix(tenant), MAX_HISTORY_BYTES, MAX_HISTORY_TURNS]
        answer = await self._call("CHAIN", [head], args)
        if answer[0] == "missing":
            if answer[1] == head:
                raise NotStored(
                    "previous_response_not_found", f"Previous response with id '{_shown(response_id)}' not found."
                )
            gone = answer[1].removeprefix(_prefix(tenant)).partition(":")[2]
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
        self, tenant: str, response: dict[str, Any], input_items: Sequence[Item], turn: Turn | None, *, store: bool
    ) -> None:
        """Stores a finished response (if `store`) and appends its turn to the conversation, both or nothing.
        Raises TurnLost if the conversation is no longer as the turn has read it."""
        output = response["output"]
        fields: list[Any] = []
        if store:
            values = {
                "response": orjson.dumps(response),
                "input": orjson.dumps(list(input_items)),
                "output": orjson.dumps(output),
                "previous": response.get("previous_response_id") or "",
                "conversation": turn.conversation_id if turn else "",
                "before": turn.seq if turn else 0,
            }
            fields = [part for pair in values.items() for part in pair]
        keys = [_key(tenant, "resp", response["id"])]
        args = [self._ttl_s, turn.token if turn else "", turn.seq if turn else "", len(fields) // 2, *fields]
        if turn:
            keys.append(_key(tenant, "conv", turn.conversation_id))
            args.extend(_flat([*input_items, *output]))
        elif not store:
            return
        if await self._call("COMMIT", keys, args) != "ok":
            raise TurnLost(
                "conversation_changed", "The conversation was changed or deleted while the turn was running."
            )

    # -- conversations

    async def create(self, tenant: str, metadata: dict[str, str], items: Sequence[Item]) -> Conversation:
        conversation = Conversation(new_id("conv"), int(time.time()), metadata)
        args = [self._ttl_s, conversation.created_at, orjson.dumps(metadata), *_flat(items)]
        await self._call("CREATE", [_key(tenant, "conv", conversation.id)], args)
        return conversation

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        row = await self._redis.hmget(_key(tenant, "conv", conversation_id), ["created_at", "metadata"])
        if row[0] is None:
            raise _no_conversation(conversation_id)
        return Conversation(conversation_id, int(row[0]), orjson.loads(row[1]))

    async def update(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        key = _key(tenant, "conv", conversation_id)
        created_at = await self._call("UPDATE", [key], [self._ttl_s, orjson.dumps(metadata)])
        if created_at is None:
            raise _no_conversation(conversation_id)
        return Conversation(conversation_id, int(created_at), metadata)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Deletes the conversation and its items; raises ConversationBusy while a turn runs."""
        _check(await self._call("DELETE", [_key(tenant, "conv", conversation_id)], []), conversation_id)

    async def append(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
        """Adds items at the end; raises ConversationBusy while a turn runs."""
        key = _key(tenant, "conv", conversation_id)
        _check(await self._call("APPEND", [key], [self._ttl_s, *_flat(items)]), conversation_id)

    async def page(self, tenant: str, conversation_id: str, *, limit: int, order: str, after: str | None) -> Page:
        """`limit` items in `order` (asc = oldest first) that follow the item `after`."""
        key = _key(tenant, "conv", conversation_id)
        answer = await self._call("PAGE", [key], [self._ttl_s, limit, order, after or ""])
        _check(answer[0], conversation_id, after)
        return Page([orjson.loads(text) for text in answer[1] if text is not None], bool(answer[2]))

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> Item:
        text = await self._redis.hget(_key(tenant, "conv", conversation_id) + ":items", item_id)
        if text is None:
            await self.get(tenant, conversation_id)
            raise _no_item(item_id)
        item: Item = orjson.loads(text)
        return item

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> Conversation:
        answer = await self._call("DELETE_ITEM", [_key(tenant, "conv", conversation_id)], [item_id])
        _check(answer[0], conversation_id, item_id)
        return Conversation(conversation_id, int(answer[1]), orjson.loads(answer[2]))

    # -- turns

    async def begin(self, tenant: str, conversation_id: str) -> Turn:
        """Takes the conversation for one turn and reads it; raises ConversationBusy if another turn runs."""
        token = secrets.token_hex(16)
        args = [self._ttl_s, token, int(TURN_LEASE_S * 1000), MAX_HISTORY_BYTES]
        answer = await self._call("BEGIN", [_key(tenant, "conv", conversation_id)], args)
        _check(answer[0], conversation_id)
        items = [orjson.loads(text) for text in reversed(answer[2])]
        return Turn(conversation_id, token, answer[1], History(items, bool(answer[3])))

    async def renew(self, tenant: str, turn: Turn) -> None:
        await self._call("HOLD", [_key(tenant, "conv", turn.conversation_id)], [turn.token, int(TURN_LEASE_S * 1000)])

    async def release(self, tenant: str, turn: Turn) -> None:
        """Lets the conversation go without a turn; harmless after keep()."""
        await self._call("HOLD", [_key(tenant, "conv", turn.conversation_id)], [turn.token, 0])

    async def _call(self, name: str, keys: list[str], args: list[Any]) -> Any:
        return await self._scripts[name](keys=keys, args=args)


def _prefix(tenant: str) -> str:
    return f"{{t:{tenant}}}:"


def _key(tenant: str, kind: str, object_id: str) -> str:
    """The key of an object; an id that we can't have made leads to a key that is never written."""
    return f"{_prefix(tenant)}{kind}:{object_id if ID_PATTERN.fullmatch(object_id) else 'none'}"


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
