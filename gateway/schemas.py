"""Bodies of the OpenAI routes: every field is used, accepted without effect, or refused by name; none is dropped
silently. Ranges of sampling parameters are checked by SamplingParams, so that they are written once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from engine.params import MAX_LOGPROBS, SamplingParams
from gateway.errors import bad_request
from gateway.messages import Body, Message

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, True, False),
    "functions": (None, []), "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}), "structured_outputs": (None,),
    "modalities": (None, ["text"]), "audio": (None,), "prediction": (None,), "web_search_options": (None,),
    "store": (None, False), "reasoning_effort": (None,), "verbosity": (None,), "moderation": (None,),
    "suffix": (None, ""), "length_penalty": (None, 1), "use_beam_search": (None, False),
    "spaces_between_special_tokens": (None, True, False), "documents": (None,), "chat_template": (None,),
    "bad_words": (None, []), "logprob_token_ids": (None, []), "priority": (None, 0), "vllm_xargs": (None,),
    "kv_transfer_params": (None,), "ec_transfer_params": (None,), "mm_processor_kwargs": (None,),
}  # fmt: skip
"""Fields that Chorus does not serve (yet), or that no client may decide: only these values, which ask for nothing."""
SAMPLING = frozenset((
    "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "max_tokens", "min_tokens", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "prompt_logprobs",
    "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens",
))  # fmt: skip
"""Fields that SamplingParams has under the same name."""
MAX_PROMPTS = 1024
MAX_CHOICES_IN_ALL = 2048
MAX_ENTRIES = 1024
MAX_ALLOWED = 100_000
Ids = Annotated[list[int], Field(fail_fast=True)]
"""A list of a million wrong entries is wrong at its first one."""


def check_fields(body: Any) -> Any:
    """Takes out what asks for nothing; raises ApiError for what is refused."""
    if not isinstance(body, Mapping):
        raise bad_request("The request body must be a JSON object.", code=None)
    if NEUTRAL.keys().isdisjoint(body):
        return body
    for name, values in NEUTRAL.items():
        if name in body and body[name] not in values:
            raise bad_request(f"Unsupported parameter: '{name}' is not supported here.", name, "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in NEUTRAL}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Body):
    """What chats and completions have in common: the sampling parameters of OpenAI and vLLM, and how to answer."""

    model: str
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_ENTRIES, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_ENTRIES)] | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED, fail_fast=True)] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # accepted, without effect: cache salts and ids of requests are the gateway's own
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    request_id: Annotated[str, Field(max_length=512)] | None = None
    session_id: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        return check_fields(body)

    @model_validator(mode="after")
    def _together(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("'prompt_logprobs' is not available in streams.", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise bad_request("It must be -1 (as much as fits) or at least 1.", "truncate_prompt_tokens")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise bad_request("Only together with 'truncate_prompt_tokens'.", "truncation_side")
        if self.metadata is not None and len(self.metadata) > 16:
            raise bad_request("At most 16 pairs.", "metadata")
        return self

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def given(self) -> frozenset[str]:
        """Sampling parameters that the client set."""
        return frozenset(self._chosen())

    def _chosen(self) -> dict[str, Any]:
        fields = self.model_fields_set & SAMPLING
        return {name: value for name in fields if (value := getattr(self, name)) is not None}

    def sampling(self, **values: Any) -> SamplingParams:
        """SamplingParams; what the client left out or set to null has its default. Raises ParamsError, ApiError."""
        return SamplingParams(**{**self._chosen(), "logit_bias": token_bias(self.logit_bias), **values})


def token_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings: ids of tokens. Raises ApiError."""
    if not bias:
        return None
    if not all(re.fullmatch(r"-?[0-9]{1,18}", key) for key in bias):
        raise bad_request("Invalid key in 'logit_bias': keys are token ids.", "logit_bias")
    return {int(key): value for key, value in bias.items()}


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("Not together with 'add_generation_prompt'.", "continue_final_message")
        return self

    def params(self) -> SamplingParams:
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise bad_request("It must be at least 1.", "max_completion_tokens")
        return self.sampling(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    @property
    def given(self) -> frozenset[str]:
        return super().given | (frozenset() if self.max_completion_tokens is None else {"max_tokens"})

    @property
    def echoed(self) -> str:
        """What comes before the answer: with `echo`, the turn of the assistant that it goes on with."""
        last = self.messages[-1]
        return (last.text or "") if self.echo and last.role == "assistant" else ""

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template(index) for index, message in enumerate(self.messages)]


class CompletionRequest(Generation):
    """POST /v1/completions. max_tokens 0 is allowed with `echo`: then only the prompt is wanted."""

    prompt: str | Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _few(cls, body: Any) -> Any:
        """Before a million lists are looked at one by one."""
        prompt = body.get("prompt") if isinstance(body, Mapping) else None
        if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
            raise bad_request(f"At most {MAX_PROMPTS} prompts.", "prompt")
        return body

    @model_validator(mode="after")
    def _completion(self) -> CompletionRequest:
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES_IN_ALL:
            raise bad_request(f"At most {MAX_CHOICES_IN_ALL} choices in all.", "n")
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = "Unsupported parameter: 'best_of' above 'n' is not supported."
            raise bad_request(message, "best_of", "unsupported_parameter")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The four forms as two. An empty list is one empty prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return cast("list[list[int]]", [self.prompt])
        return self.prompt

    @property
    def without_output(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def params(self) -> SamplingParams:
        limit = 16 if self.max_tokens is None else 1 if self.without_output else self.max_tokens
        prompt_logprobs = self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs
        return self.sampling(max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages. (vLLM's form.)"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Send either 'prompt' or 'messages'.", "prompt")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
