"""NewResponse: the body of POST /v1/responses, checked; and the response object that answers it. Text only.

Every field of OpenAI's is used, accepted because it changes nothing here, or refused by name (docs/api.md lists them).
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from engine.params import SamplingParams
from gateway.conversations import new_id
from gateway.errors import ApiError, bad_request
from gateway.schemas import token_bias

SAMPLING = (
    "temperature", "top_p", "seed", "stop", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "include_stop_str_in_output",
    "skip_special_tokens",
)  # fmt: skip
"""Fields that SamplingParams has under the same name."""
LOGPROBS = "message.output_text.logprobs"

Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]
"""≤ 16 pairs, keys ≤ 64 and values ≤ 512 characters."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ConversationRef(_Body):
    id: str


class StreamOptions(_Body):
    """`include_obfuscation` is accepted and changes nothing: we add no padding."""

    include_obfuscation: bool | None = None


class TextFormat(_Body):
    type: str


class TextOptions(_Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class NewResponse(_Body):
    """What POST /v1/responses takes. `input` is parsed by gateway.items."""

    model: str
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Annotated[int, Field(ge=16)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # as in chat completions: vLLM's sampling extras and those of OpenAI that Responses lacks
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # accepted, without effect
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    # only where they ask for what we do anyway
    background: bool | None = None
    text: TextOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    reasoning: Any = None
    service_tier: str | None = None
    prompt: Any = None
    context_management: list[Any] | None = None
    moderation: None = None
    background_options: None = None
    access_programs: None = None
    image: None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        raise_if_unsupported(self)
        return self

    def params(self) -> SamplingParams:
        """Raises ParamsError, naming the field as this API calls it."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        bias = token_bias(self.logit_bias)
        return SamplingParams(**given, max_tokens=self.max_output_tokens, logprobs=logprobs, logit_bias=bias)

    @property
    def given(self) -> frozenset[str]:
        """Sampling parameters that the client set."""
        given = frozenset(name for name in SAMPLING if getattr(self, name) is not None)
        return given if self.max_output_tokens is None else given | {"max_tokens"}

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


class CountedInput(NewResponse):
    """What POST /v1/responses/input_tokens takes: the same, of which only what makes up the prompt counts."""

    model: str = ""
    personality: None = None


def raise_if_unsupported(body: NewResponse) -> None:
    """Raises ApiError 400, naming the field, for what can't be done or contradicts itself."""
    refusals: list[tuple[str, bool, str]] = [
        ("background", body.background is True, "Background responses are not supported."),
        ("tools", bool(body.tools), "Tools are not supported yet."),
        ("tool_choice", body.tool_choice not in (None, "none", "auto"), "Tools are not supported yet."),
        ("text.format", _format(body) != "text", "Only the text format is supported yet."),
        ("text.verbosity", _verbosity(body) != "medium", "Verbosity can't be chosen."),
        ("reasoning", _asks(body.reasoning), "This model has no reasoning to be configured."),
        ("context_management", bool(body.context_management), "Only `truncation` shortens what is read."),
        ("prompt", body.prompt is not None, "Prompt templates are not supported."),
        ("service_tier", body.service_tier not in (None, "auto", "default"), "There is only the default tier."),
        ("include", any(name != LOGPROBS for name in body.include or ()), f"Only {LOGPROBS} can be included."),
        ("stream_options", body.stream_options is not None and not body.stream, "It needs `stream: true`."),
    ]
    for param, is_refused, message in refusals:
        if is_refused:
            raise ApiError(400, f"Unsupported value for '{param}': {message}", code="unsupported_value", param=param)
    if body.conversation is not None and body.previous_response_id is not None:
        raise bad_request("Give `conversation` or `previous_response_id`, not both.", "previous_response_id")


def _format(body: NewResponse) -> str:
    return body.text.format.type if body.text and body.text.format else "text"


def _verbosity(body: NewResponse) -> str:
    return (body.text.verbosity if body.text else None) or "medium"


def _asks(value: Any) -> bool:
    return any(part is not None for part in value.values()) if isinstance(value, dict) else value is not None


def response_object(body: NewResponse, is_stored: bool) -> dict[str, Any]:
    """The response as it is before its first token."""
    conversation = body.conversation_id
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation},
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
