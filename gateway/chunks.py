"""Deltas → OpenAI's objects: chunks of a stream, or one whole body, for chats (text_chunks: for completions). Pure.

opening() → add(delta)* → closing()    the frames of a stream, in the only order that clients accept
add(delta)* → whole()                  one body
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import orjson

from engine.protocol import TokenLogprobs
from gateway.answer import Answer, Delta, Usage
from gateway.errors import rate_headers
from gateway.logprobs import Names, chat_logprobs, prompt_logprobs
from gateway.sse import DONE, frame

MARK = "text"


@dataclass(frozen=True)
class Shape:
    """What the client wants to see. `usage`: a usage chunk at the end of a stream; `usage_always`: in every chunk;
    `echo`: the prompt's text before the answer's; `prefix`: this text; `token_ids`: ids of prompt and output."""

    names: Names
    logprobs: bool = False
    usage: bool = False
    usage_always: bool = False
    echo: bool = False
    prompt_logprobs: bool = False
    prefix: str = ""
    token_ids: bool = False
    service_tier: str | None = None


def usage_dict(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def answer_headers(answer: Answer) -> dict[str, str]:
    """Rate limits as they stood at admission, which version of an adapter answers, and where it lay then."""
    headers = rate_headers(answer.hold.windows)
    if answer.model.version is not None:
        headers["x-adapter-version"] = str(answer.model.version)
    if answer.tier:
        headers["x-chorus-adapter-tier"] = answer.tier
    return headers


class Writer(ABC):
    """What chats and completions have in common."""

    prefix = ""
    chunk_object = ""
    whole_object = ""

    def __init__(self, answer: Answer, shape: Shape) -> None:
        self.answer = answer
        self.shape = shape
        is_own = answer.tokenizer is not shape.names.tokenizer
        self.names = replace(shape.names, tokenizer=answer.tokenizer) if is_own else shape.names
        self._finish: dict[int, dict[str, Any]] = {}
        self._text: defaultdict[int, list[str]] = defaultdict(list)
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._ids: defaultdict[int, list[int]] = defaultdict(list)
        self._head: dict[str, Any] = {
            "id": self.prefix + answer.id, "object": self.chunk_object, "created": answer.created,
            "model": answer.ask.model, "system_fingerprint": answer.fingerprint,
        }  # fmt: skip
        if shape.service_tier is not None:
            self._head["service_tier"] = shape.service_tier

    @property
    def num_choices(self) -> int:
        return len(self.answer.ask.prompts) * self.answer.ask.params.n

    @abstractmethod
    def opening(self) -> bytes: ...
    @abstractmethod
    def add(self, delta: Delta) -> bytes: ...
    @abstractmethod
    def collect(self, delta: Delta) -> None: ...
    @abstractmethod
    def whole(self) -> bytes: ...

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.shape.usage:
            chunk["usage"] = usage_dict(self.answer.usage) if self.shape.usage_always else None
        return frame(orjson.dumps(chunk))

    def closing(self) -> bytes:
        """The usage chunk, if asked for, is the last one."""
        if not self.shape.usage:
            return DONE
        return frame(orjson.dumps({**self._head, "choices": [], "usage": usage_dict(self.answer.usage)})) + DONE

    def _whole(self, choices: list[dict[str, Any]]) -> bytes:
        body = {**self._head, "object": self.whole_object, "choices": choices, "usage": usage_dict(self.answer.usage)}
        return orjson.dumps(body)

    def _prompt_logprobs_of(self, prompt: int) -> list[dict[str, dict[str, Any]] | None]:
        ids = self.answer.prompt_ids[prompt]
        return prompt_logprobs(self.names, ids, self._prompt_logprobs.get(prompt, [None] * len(ids)))


class ChatWriter(Writer):
    """One conversation, n choices."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, answer: Answer, shape: Shape) -> None:
        super().__init__(answer, shape)
        self._content: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        """The role, once per choice, in the order of indices: SDKs index a list by it."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        if self.shape.token_ids:
            self._head["prompt_token_ids"] = self.answer.prompt_ids[0]
        first = self._delta(0, delta)
        self._head.pop("prompt_token_ids", None)
        frames = [first, *(self._delta(index, delta) for index in range(1, self.num_choices))]
        if self.shape.prefix:
            frames += [self._delta(index, {"content": self.shape.prefix}) for index in range(self.num_choices)]
        return b"".join(frames)

    def add(self, delta: Delta) -> bytes:
        data = b""
        if delta.text or delta.ids or (delta.tokens and self.shape.logprobs):
            if self.shape.logprobs:
                logprobs = {"content": chat_logprobs(self.names, delta.tokens), "refusal": None}
                data = self._delta(delta.choice, {"content": delta.text}, logprobs, ids=delta.ids)
            elif delta.ids or self.shape.usage_always:
                data = self._delta(delta.choice, {"content": delta.text}, ids=delta.ids)
            else:
                before, after = self._around.get(delta.choice) or self._make_around(delta.choice)
                data = before + orjson.dumps(delta.text) + after
        if delta.finish is not None:
            data += self._delta(delta.choice, {}, None, delta)
        return data

    def _make_around(self, choice: int) -> tuple[bytes, bytes]:
        """What is the same in every frame with nothing but text, before and after the text."""
        before, _, after = self._delta(choice, {"content": MARK}).rpartition(orjson.dumps(MARK))
        self._around[choice] = before, after
        return before, after

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, end: Delta | None = None,
        ids: tuple[int, ...] = (),
    ) -> bytes:  # fmt: skip
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end.finish if end else None}
        if end is not None and end.stop_reason is not None:
            choice["stop_reason"] = end.stop_reason
        if ids:
            choice["token_ids"] = ids
        return self._chunk(choice)

    def collect(self, delta: Delta) -> None:
        self._text[delta.choice].append(delta.text)
        self._ids[delta.choice] += delta.ids
        if self.shape.logprobs:
            self._content[delta.choice] += chat_logprobs(self.names, delta.tokens)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[0] = delta.prompt_logprobs
        if delta.finish is not None:
            self._finish[delta.choice] = {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}

    def whole(self) -> bytes:
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": self.shape.prefix + "".join(self._text[index]),
                    "refusal": None,
                },
                "logprobs": {"content": self._content[index], "refusal": None} if self.shape.logprobs else None,
                **self._finish[index],
                **({"token_ids": self._ids[index]} if self.shape.token_ids else {}),
            }
            for index in range(self.num_choices)
        ]
        if self.shape.token_ids:
            self._head["prompt_token_ids"] = self.answer.prompt_ids[0]
        if self.shape.prompt_logprobs:
            self._head["prompt_logprobs"] = self._prompt_logprobs_of(0)
        return self._whole(choices)
