"""Prompts: what a client sends → ids that fit the model, long texts in a few threads. Knows no HTTP and no tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.protocol import Ready, Refused
from engine.template import Message
from engine.text import PromptError, Render, Tokenizer

T = TypeVar("T")
INLINE_CHARS = 2048
"""Texts up to this length are encoded on the event loop: a millisecond at most, less than a thread costs others."""
MAX_WAITING = 256
OPENING = 1024
"""Characters or ids by which a raw prompt is known."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation, for the model's chat template; contents are strings. `render`: an adapter's own template."""

    messages: list[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    render: Render | None = None
    tokenizer: Tokenizer | None = None

    @property
    def num_chars(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Text:
    """A raw prompt."""

    text: str
    add_special_tokens: bool = True
    tokenizer: Tokenizer | None = None

    @property
    def num_chars(self) -> int:
        return len(self.text)


Prompt = Chat | Text | list[int]


@dataclass(frozen=True)
class Truncation:
    """Keep at most `limit` tokens of each prompt (-1 = as many as fit beside one token of output): the last ones, or
    the first."""

    limit: int
    keeps_first: bool = False

    def __call__(self, ids: list[int], ready: Ready) -> list[int]:
        """Raises PromptError."""
        if self.limit > ready.max_model_len:
            raise PromptError(f"It must not be above {ready.max_model_len}.", "truncate_prompt_tokens")
        limit = ready.max_model_len - 1 if self.limit < 0 else self.limit
        return ids[:limit] if self.keeps_first else ids[-limit:]


def opening(prompt: Prompt) -> str:
    """How it begins: a conversation up to what its user says first, which comes again with each of its turns."""
    if isinstance(prompt, list):
        return str(prompt[:OPENING])
    if isinstance(prompt, Text):
        return prompt.text[:OPENING]
    first = next((i for i, message in enumerate(prompt.messages) if message["role"] == "user"), 0)
    return "\0".join(f"{message['role']}:{message['content']}" for message in prompt.messages[: first + 1])


class PromptTooLong(Refused):
    """The prompt, or prompt and output, are more than the model's context."""


class PromptEncoder:
    """Encodes at most `num_threads` long prompts at once; a bounded number waits, more are refused."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int = 2) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self._renderers = ThreadPoolExecutor(num_threads, thread_name_prefix="render")
        self._waiting = 0

    def close(self) -> None:
        for pool in (self._pool, self._renderers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, prompts: Sequence[Prompt], param: str, ready: Ready, truncation: Truncation | None = None
    ) -> list[list[int]]:
        """Raises PromptError or Refused; `param` is the request field that the prompts came from."""
        return [await self._encode_one(prompt, param, ready, truncation) for prompt in prompts]

    async def _encode_one(self, prompt: Prompt, param: str, ready: Ready, truncation: Truncation | None) -> list[int]:
        if isinstance(prompt, list):
            ids = prompt
        else:
            if truncation is None:
                _check_size(prompt, param, ready, self._tokenizer(prompt))
            ids = await self.ids(prompt, param)
        if truncation is not None:
            ids = truncation(ids, ready)
        if not ids:
            raise PromptError("The prompt is empty: it must have at least one token.", param)
        if min(ids) < 0 or max(ids) >= ready.vocab_size:
            raise PromptError(f"Token ids must be in [0, {ready.vocab_size}).", param)
        if len(ids) >= ready.max_model_len:
            raise too_long(ready.max_model_len, f"{len(ids)} tokens in the prompt", param)
        return ids

    async def ids(self, prompt: Chat | Text, param: str) -> list[int]:
        """Whatever its length. Raises PromptError about `param`, or Refused."""
        tokenizer = self._tokenizer(prompt)
        try:
            if isinstance(prompt, Chat) and prompt.render is not None:
                return await self._run(self._renderers, lambda: _ids(prompt, tokenizer))
            return await self.offload(prompt.num_chars, lambda: _ids(prompt, tokenizer))
        except PromptError as error:
            raise PromptError(error.message, param) from error

    def _tokenizer(self, prompt: Chat | Text) -> Tokenizer:
        return prompt.tokenizer or self.tokenizer

    async def offload(self, num_chars: int, work: Callable[[], T]) -> T:
        """Runs `work`, which takes time in proportion to `num_chars`, without holding up the event loop."""
        return work() if num_chars <= INLINE_CHARS else await self._run(self._pool, work)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._waiting >= MAX_WAITING:
            raise Refused("queue_full", "Too many long prompts are waiting to be read.", 1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self._waiting -= 1


def _check_size(prompt: Chat | Text, param: str, ready: Ready, tokenizer: Tokenizer) -> None:
    """A text that can't fit, whatever its tokens are, is not even encoded."""
    if prompt.num_chars > ready.max_model_len * tokenizer.longest_token_bytes:
        raise too_long(ready.max_model_len, f"{prompt.num_chars} characters in the prompt", param)


def _ids(prompt: Chat | Text, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, Text):
        return tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
    return tokenizer.encode_chat(
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        add_special_tokens=prompt.add_special_tokens,
        variables=prompt.variables,
        render=prompt.render,
    )


def too_long(limit: int, asked: str, param: str) -> PromptTooLong:
    return PromptTooLong(
        "prompt_too_long", f"This model's maximum context length is {limit} tokens, but you asked for {asked}.", None,
        param,
    )  # fmt: skip
