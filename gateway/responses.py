"""/v1/responses: OpenAI's Responses API for text: create (plain, streaming), read, delete, input items."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.params import SamplingParams
from gateway.answer import Answer, Ask, Delta, Usage
from gateway.auth import renewal, requires, state_of
from gateway.bodies import body_as, ignored_of
from gateway.chunks import answer_headers
from gateway.conversations import NotStored
from gateway.errors import ApiError, bad_request, to_api_error
from gateway.exchange import Dress, Exchange
from gateway.inference import Inference, Renew
from gateway.item_lists import After, Limit, Order, item_list, refuse_unserved
from gateway.logprobs import Names, chat_logprobs
from gateway.openai import body_of
from gateway.prompts import Chat
from gateway.response_events import ResponseWriter
from gateway.response_request import CountedInput, NewResponse, response_object
from gateway.sse import EventStream, unless_gone
from tenants.keys import Principal

router = APIRouter(prefix="/v1/responses", tags=["responses"], dependencies=[Depends(refuse_unserved)])
TENANT: Any = Depends(requires("inference"))


@router.post("", openapi_extra=body_of(NewResponse))
async def create_response(request: Request, principal: Principal = TENANT) -> Response:
    state = state_of(request)
    body = body_as(request, NewResponse)
    exchange = await Exchange.open(state.conversations.of(principal), body, ignored_of(request))
    try:
        answer = await unless_gone(request, _ask(request, principal, exchange))
        run = _Run(exchange, answer, Names(answer.tokenizer))
    except BaseException:
        await exchange.close()
        raise
    if body.stream:
        return EventStream(run.frames(), close=run.close, headers=run.headers(), on_error=run.failed)
    try:
        return JSONResponse(await unless_gone(request, run.whole()), headers=run.headers())
    finally:
        await run.close()


async def _ask(request: Request, principal: Principal, exchange: Exchange) -> Answer:
    state, renew = state_of(request), renewal(request)
    ask = Ask(
        model=exchange.body.model,
        prompts=[],
        params=exchange.body.params(),
        given=exchange.body.given,
        param="input",
        endpoint="responses",
        request_id=request.scope.get("chorus.request_id", ""),
        user=exchange.body.user or "",
        conversation=exchange.conversation,
        tags=exchange.body.metadata,
    )
    dress = _dressing(state.inference, principal, ask, renew)
    messages = await exchange.messages(state.inference.encoder, state.replicas.ready(), dress)
    return await state.inference.stream(principal, replace(ask, prompts=[Chat(messages=messages)]), renew)


def _dressing(inference: Inference, principal: Principal, ask: Ask, renew: Renew) -> Dress:
    async def dress(chat: Chat) -> Chat:
        dressed, _ = await inference.dressed(principal, replace(ask, prompts=[chat]), renew)
        (found,) = dressed.prompts
        assert isinstance(found, Chat)
        return found

    return dress


class _Run:
    """An accepted response: its frames, or its whole object; settled and stored before either ends."""

    def __init__(self, exchange: Exchange, answer: Answer, names: Names) -> None:
        self._exchange = exchange
        self._answer = answer
        self._names = names
        chosen = answer.ask.params
        used: dict[str, Any] = {"temperature": chosen.temperature, "top_p": chosen.top_p}
        if answer.ask.is_limit_soft:
            used["max_output_tokens"] = chosen.max_tokens
        self._writer = ResponseWriter(response_object(exchange.body, exchange.is_stored) | used)

    async def frames(self) -> AsyncIterator[bytes]:
        """A fault ends the stream as an event, and frees the conversation before it is told."""
        try:
            async for data in self._told():
                yield data
        except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it
            await self.close()
            yield self.failed(to_api_error(error))

    async def _told(self) -> AsyncIterator[bytes]:
        yield self._writer.open()
        async for deltas in self._answer:
            yield b"".join([self._add(delta) for delta in deltas])
        await self._answer.aclose()
        await self._exchange.keep(self._writer.response)
        yield self._writer.close()

    def _add(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta)
        data = self._writer.add(delta.text, logprobs) if delta.text or logprobs else b""
        if delta.finish is not None:
            self._writer.finish(delta.finish, usage_object(self._answer.usage))
        return data

    async def whole(self) -> dict[str, Any]:
        self._answer.is_whole = True
        async for _ in self._told():
            pass
        return self._writer.response

    def failed(self, error: ApiError) -> bytes:
        return self._writer.fail(error.message, usage=usage_object(self._answer.usage))

    def headers(self) -> dict[str, str]:
        return answer_headers(self._answer)

    async def close(self) -> None:
        try:
            await self._answer.aclose()
        finally:
            await self._exchange.close()

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        return chat_logprobs(self._names, delta.tokens) if self._exchange.body.wants_logprobs else []


def usage_object(usage: Usage) -> dict[str, Any]:
    """Responses has its own names for it; all of them are required."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


@router.post("/input_tokens", openapi_extra=body_of(CountedInput))
async def count_input_tokens(request: Request, principal: Principal = TENANT) -> dict[str, Any]:
    """How many tokens a response would read: what was said before, instructions and input. Generates nothing."""
    state = state_of(request)
    body = body_as(request, CountedInput)
    if body.model:
        await state.inference.models.resolve(principal, body.model, renewal(request))
    exchange = await Exchange.open(state.conversations.of(principal), body, ignored_of(request))
    try:
        ask = Ask(model=body.model, prompts=[], params=SamplingParams(), conversation=exchange.conversation)
        dress = _dressing(state.inference, principal, ask, renewal(request)) if body.model else _as_it_is
        messages = await exchange.messages(state.inference.encoder, state.replicas.ready(), dress)
        ids = await state.inference.encoder.ids(await dress(Chat(messages=messages)), "input")
    finally:
        await exchange.close()
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


async def _as_it_is(chat: Chat) -> Chat:
    return chat


@router.post("/compact")
async def compact(principal: Principal = TENANT) -> Response:
    raise ApiError(400, "Compaction is not supported.", code="unsupported_value", param="compact")


@router.get("/{response_id}")
async def read_response(
    request: Request, response_id: str, stream: bool = False, principal: Principal = TENANT
) -> dict[str, Any]:
    if stream:
        raise bad_request("Only background responses can be streamed later.", "stream", "unsupported_value")
    return (await state_of(request).conversations.of(principal).get_response(response_id)).response


@router.delete("/{response_id}")
async def delete_response(request: Request, response_id: str, principal: Principal = TENANT) -> dict[str, Any]:
    await state_of(request).conversations.of(principal).delete_response(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str, principal: Principal = TENANT) -> Response:
    await state_of(request).conversations.of(principal).get_response(response_id)
    raise ApiError(400, "Only background responses can be cancelled.", code="unsupported_value", param="background")


@router.get("/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
    principal: Principal = TENANT,
) -> dict[str, Any]:
    stored = await state_of(request).conversations.of(principal).get_response(response_id)
    items = stored.input_items if order == "asc" else stored.input_items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise NotStored("item_not_found", f"Item with id '{after[:80]}' not found in this response.")
    start = 0 if after is None else ids.index(after) + 1
    return item_list(items[start : start + limit], start + limit < len(items))
