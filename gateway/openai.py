"""OpenAI's routes: chat/completions, completions, models; and vLLM's tokenize, detokenize, version."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from engine.params import SamplingParams
from gateway.answer import Answer, Ask
from gateway.auth import renewal, requires, state_of
from gateway.bodies import body_as
from gateway.chunks import ChatWriter, Shape, Writer, answer_headers
from gateway.errors import ApiError, bad_request
from gateway.logprobs import Names
from gateway.models import Model, ModelTable
from gateway.prompts import Chat, Prompt, Text, Truncation
from gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest
from gateway.sse import EventStream, unless_gone
from gateway.state import State
from gateway.text_chunks import TextWriter
from tenants.keys import Principal

router = APIRouter(tags=["openai"])
Tenant = Depends(requires("inference"))
STORED = "/v1/chat/completions/{completion_id}"


def body_of(kind: type[Any]) -> dict[str, Any]:
    """For the OpenAPI document: these bodies are read strictly, before FastAPI sees them."""
    schema = kind.model_json_schema()
    schema = inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def inlined(part: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema without references: none of our bodies is recursive."""
    if isinstance(part, list):
        return [inlined(entry, definitions) for entry in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {name: inlined(value, definitions) for name, value in part.items()}


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
async def chat_completions(request: Request, principal: Principal = Tenant) -> Response:
    """An answer to a conversation, by the base model or an adapter."""
    body = body_as(request, ChatRequest)
    chat = Chat(
        messages=body.template_messages(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs or {},
    )
    ask = _ask(request, body, [chat], param="messages", params=body.params())
    shape = _shape(request, body, logprobs=bool(body.logprobs), prefix=body.echoed)
    return await _answer(request, principal, ask, shape, body.stream, ChatWriter)


@router.api_route("/v1/chat/completions", methods=["GET"], include_in_schema=False)
@router.api_route(STORED, methods=["GET", "POST", "DELETE"], include_in_schema=False)
@router.api_route(f"{STORED}/messages", methods=["GET"], include_in_schema=False)
async def stored_chat_completions(_: Principal = Tenant) -> Response:
    raise ApiError(400, "Chat completions are not stored here.", code="unsupported_value", param="store")


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def completions(request: Request, principal: Principal = Tenant) -> Response:
    """Continuations of one or more prompts: text or token ids."""
    body = body_as(request, CompletionRequest)
    prompts: list[Prompt] = [
        Text(prompt, body.add_special_tokens is not False) if isinstance(prompt, str) else prompt
        for prompt in body.prompts
    ]
    ask = _ask(
        request, body, prompts, param="prompt", params=body.params(), endpoint="completions",
        without_output=body.without_output,
    )  # fmt: skip
    shape = _shape(request, body, logprobs=body.logprobs is not None, echo=bool(body.echo))
    return await _answer(request, principal, ask, shape, body.stream, TextWriter)


def _ask(request: Request, body: Generation, prompts: list[Prompt], **values: Any) -> Ask:
    return Ask(
        model=body.model, prompts=prompts, request_id=request.scope.get("chorus.request_id", ""),
        user=body.user or "", tags=body.metadata, cache_salt=body.cache_salt or "", given=body.given,
        truncation=_truncation(body), token_ids=bool(body.return_token_ids), **values,
    )  # fmt: skip


def _truncation(body: Generation) -> Truncation | None:
    if body.truncate_prompt_tokens is None:
        return None
    return Truncation(body.truncate_prompt_tokens, keeps_first=body.truncation_side == "right")


def _shape(request: Request, body: Generation, **values: Any) -> Shape:
    return Shape(
        names=Names(state_of(request).tokenizer, bool(body.return_tokens_as_token_ids)),
        usage=body.wants_usage,
        usage_always=body.wants_usage_always,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        service_tier="default" if body.service_tier else None,
        **values,
    )


async def _answer(
    request: Request, principal: Principal, ask: Ask, shape: Shape, stream: bool | None, kind: type[Writer]
) -> Response:
    inference = state_of(request).inference
    renew = renewal(request)
    if not stream:
        return await unless_gone(request, _plain(state_of(request), principal, ask, shape, request, kind))
    answer = await unless_gone(request, inference.stream(principal, ask, renew))
    return EventStream(_frames(answer, kind(answer, shape)), close=answer.aclose, headers=answer_headers(answer))


async def _plain(
    state: State, principal: Principal, ask: Ask, shape: Shape, request: Request, kind: type[Writer]
) -> Response:
    async with await state.inference.stream(principal, ask, renewal(request)) as answer:
        writer = kind(answer, shape)
        answer.is_whole = True
        async for deltas in answer:
            for delta in deltas:
                writer.collect(delta)
    return Response(writer.whole(), headers=answer_headers(answer), media_type="application/json")


async def _frames(answer: Answer, writer: Writer) -> AsyncIterator[bytes]:
    """Settled before the end is told: who sees [DONE] has a free place for the next request."""
    yield writer.opening()
    async for deltas in answer:
        data = b"".join([writer.add(delta) for delta in deltas])
        if data:
            yield data
    await answer.aclose()
    yield writer.closing()


@router.get("/v1/models")
async def list_models(request: Request, principal: Principal = Tenant) -> dict[str, Any]:
    """Everything that the caller may call, whether it is in the engine's memory or not."""
    models = state_of(request).inference.models
    return {"object": "list", "data": [_model_object(models, model) for model in await models.visible(principal)]}


@router.get("/v1/models/{model:path}")
async def read_model(request: Request, model: str, principal: Principal = Tenant) -> dict[str, Any]:
    models = state_of(request).inference.models
    _, found = await models.resolve(principal, model, renewal(request))
    return _model_object(models, found)


def _model_object(models: ModelTable, model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": model.name, "object": "model", "created": model.created, "owned_by": model.owner or "chorus",
        "root": model.name, "parent": None, "max_model_len": models.max_model_len, "permission": [],
    }  # fmt: skip
    if model.adapter is not None:
        found |= {"parent": models.base.name, "version": model.version, "digest": f"sha256:{model.adapter.digest}"}
    return found


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
async def tokenize(request: Request, principal: Principal = Tenant) -> dict[str, Any]:
    """The ids of a prompt or of messages, exactly as inference would read them."""
    body = body_as(request, TokenizeRequest)
    state = state_of(request)
    if body.messages is not None:
        prompt: Chat | Text = Chat(
            messages=[message.for_template(index) for index, message in enumerate(body.messages)],
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
            variables=body.chat_template_kwargs or {},
        )
    else:
        prompt = Text(body.prompt or "", body.add_special_tokens is not False)
    dressed, _ = await _dressed(request, principal, body.model, [prompt])
    (found,) = dressed.prompts
    assert isinstance(found, (Chat, Text))
    ids = await state.inference.encoder.ids(found, "prompt" if body.messages is None else "messages")
    names = Names(dressed.tokenizer or state.tokenizer)
    return {
        "count": len(ids), "max_model_len": state.inference.models.max_model_len, "tokens": ids,
        "token_strs": [names.in_chat(token) for token in ids] if body.return_token_strs else None,
    }  # fmt: skip


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
async def detokenize(request: Request, principal: Principal = Tenant) -> dict[str, str]:
    """The text of ids, control tokens included."""
    body = body_as(request, DetokenizeRequest)
    state = state_of(request)
    dressed, num_added = await _dressed(request, principal, body.model, [])
    vocab_size = state.shape.vocab_size + num_added
    if not all(0 <= token < vocab_size for token in body.tokens):
        raise bad_request(f"Token ids must be in [0, {vocab_size}).", "tokens")
    tokenizer = dressed.tokenizer or state.tokenizer
    text = await state.inference.encoder.offload(
        len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return {"prompt": text}


async def _dressed(request: Request, principal: Principal, name: str | None, prompts: list[Prompt]) -> tuple[Ask, int]:
    """As the model of this name would be asked (None = the base), and how many tokens it adds to the vocabulary."""
    ask = Ask(model=name or "", prompts=prompts, params=SamplingParams())
    return (ask, 0) if name is None else await state_of(request).inference.dressed(principal, ask, renewal(request))


@router.get("/version")
async def read_version(_: object = Depends(requires("any"))) -> dict[str, str]:
    return {"version": version("chorus-serve")}
