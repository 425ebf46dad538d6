"""/v1/conversations: create, read, update, delete, and their items."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from gateway.auth import requires, state_of
from gateway.bodies import body_as, ignored_of
from gateway.conversations import Conversation, Conversations
from gateway.item_lists import After, Limit, Order, item_list, refuse_unserved
from gateway.items import parse_items
from gateway.openai import body_of
from gateway.response_request import Metadata
from tenants.keys import Principal

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], dependencies=[Depends(refuse_unserved)])
TENANT: Any = Depends(requires("inference"))
MAX_ITEMS = 20


class NewConversation(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: Annotated[list[Any], Field(max_length=MAX_ITEMS)] | None = None
    metadata: Metadata | None = None


class ConversationChanges(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    metadata: Metadata | None


class NewItems(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: Annotated[list[Any], Field(min_length=1, max_length=MAX_ITEMS)]


def conversations_of(request: Request, principal: Principal) -> Conversations:
    return state_of(request).conversations.of(principal)


@router.post("", openapi_extra=body_of(NewConversation))
async def create_conversation(request: Request, principal: Principal = TENANT) -> dict[str, Any]:
    body = body_as(request, NewConversation)
    items = parse_items(body.items or [], "items", ignored_of(request))
    return as_object(await conversations_of(request, principal).create(body.metadata or {}, items))


@router.get("/{conversation_id}")
async def read_conversation(request: Request, conversation_id: str, principal: Principal = TENANT) -> dict[str, Any]:
    return as_object(await conversations_of(request, principal).get(conversation_id))


@router.post("/{conversation_id}", openapi_extra=body_of(ConversationChanges))
async def update_conversation(request: Request, conversation_id: str, principal: Principal = TENANT) -> dict[str, Any]:
    body = body_as(request, ConversationChanges)
    found = await conversations_of(request, principal).update(conversation_id, body.metadata or {})
    return as_object(found)


@router.delete("/{conversation_id}")
async def delete_conversation(request: Request, conversation_id: str, principal: Principal = TENANT) -> dict[str, Any]:
    await conversations_of(request, principal).delete(conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.post("/{conversation_id}/items", openapi_extra=body_of(NewItems))
async def add_items(request: Request, conversation_id: str, principal: Principal = TENANT) -> dict[str, Any]:
    body = body_as(request, NewItems)
    items = parse_items(body.items, "items", ignored_of(request))
    await conversations_of(request, principal).append(conversation_id, items)
    return item_list(items, has_more=False)


@router.get("/{conversation_id}/items")
async def list_items(
    request: Request,
    conversation_id: str,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
    principal: Principal = TENANT,
) -> dict[str, Any]:
    page = await conversations_of(request, principal).page(conversation_id, limit=limit, order=order, after=after)
    return item_list(page.items, page.has_more)


@router.get("/{conversation_id}/items/{item_id}")
async def read_item(
    request: Request, conversation_id: str, item_id: str, principal: Principal = TENANT
) -> dict[str, Any]:
    return await conversations_of(request, principal).item(conversation_id, item_id)


@router.delete("/{conversation_id}/items/{item_id}")
async def delete_item(
    request: Request, conversation_id: str, item_id: str, principal: Principal = TENANT
) -> dict[str, Any]:
    found = await conversations_of(request, principal).delete_item(conversation_id, item_id)
    return as_object(found)


def as_object(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
    }
