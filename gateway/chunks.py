"""Deltas → OpenAI's objects: chunks of a stream, or one whole body, for chats and for completions. Pure: no I/O.

opening() → add(delta)* → closing()    the frames of a stream, in the only order that clients accept
add(delta)* → whole()                  one body
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import orjson

from engine.protocol import TokenLogprobs
from gateway.answer import Answer, Delta, Usage
from gateway.errors import rate_headers
from gateway.logprobs import Names, TextLogprobs, chat_logprobs, prompt_logprobs
from gateway.sse import DONE, frame


@dataclass(frozen=True)
class Shape:
    """What the client wants to see. `usage`: a usage chunk at the end of a stream; `usage_always`: in every chunk;
    `echo`: the prompt's text before the answer's."""

    names: Names
    logprobs: bool = False
    usage: bool = False
    usage_always: bool = False
    echo: bool = False
    prompt_logprobs: bool = False
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
    """Rate limits as they stood at admission, and which version of an adapter answers."""
    headers = rate_headers(answer.hold.windows)
    if answer.model.version is not None:
        headers["x-adapter-version"] = str(answer.model.version)
    return headers


class _Writer:
    """What chats and completions have in common."""

    prefix = ""
    chunk_object = ""
    whole_object = ""

    def __init__(self, answer: Answer, shape: Shape) -> None:
        self.answer = answer
        self.shape = shape
        self._finish: dict[int, dict[str, Any]] = {}
        self._text: defaultdict[int, list[str]] = defaultdict(list)
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._head = {
            "id": self.prefix + answer.id, "object": self.chunk_object, "created": answer.created,
            "model": answer.ask.model, "system_fingerprint": answer.fingerprint,
        }  # fmt: skip
        if shape.service_tier is not None:
            self._head["service_tier"] = shape.service_tier

    @property
    def num_choices(self) -> int:
        return len(self.answer.ask.prompts) * self.answer.ask.params.n

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
        return prompt_logprobs(self.shape.names, ids, self._prompt_logprobs.get(prompt, [None] * len(ids)))


class ChatWriter(_Writer):
    """One conversation, n choices."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, answer: Answer, shape: Shape) -> None:
        super().__init__(answer, shape)
        self._content: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)

    def opening(self) -> bytes:
        """The role, once per choice, in the order of indices: SDKs index a list by it."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._delta(index, delta) for index in range(self.num_choices))

    def add(self, delta: Delta) -> bytes:
        data = b""
        if delta.text or (delta.tokens and self.shape.logprobs):
            logprobs = None
            if self.shape.logprobs:
                logprobs = {"content": chat_logprobs(self.shape.names, delta.tokens), "refusal": None}
            data = self._delta(delta.choice, {"content": delta.text}, logprobs)
        if delta.finish is not None:
            data += self._delta(delta.choice, {}, None, delta)
        return data

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, end: Delta | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end.finish if end else None}
        if end is not None and end.stop_reason is not None:
            choice["stop_reason"] = end.stop_reason
        return self._chunk(choice)

    def collect(self, delta: Delta) -> None:
        self._text[delta.choice].append(delta.text)
        if self.shape.logprobs:
            self._content[delta.choice] += chat_logprobs(self.shape.names, delta.tokens)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[0] = delta.prompt_logprobs
        if delta.finish is not None:
            self._finish[delta.choice] = {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}

    def whole(self) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(self._text[index]), "refusal": None},
                "logprobs": {"content": self._content[index], "refusal": None} if self.shape.logprobs else None,
                **self._finish[index],
            }
            for index in range(self.num_choices)
        ]
        if self.shape.prompt_logprobs:
            self._head["prompt_logprobs"] = self._prompt_logprobs_of(0)
        return self._whole(choices)


class TextWriter(_Writer):
    """Completions: choice j of prompt i has index i·n + j."""

    prefix = "cmpl-"
    chunk_object = whole_object = "text_completion"

    def __init__(self, answer: Answer, shape: Shape) -> None:
        super().__init__(answer, shape)
        self._logprobs: defaultdict[int, TextLogprobs] = defaultdict(lambda: TextLogprobs(shape.names))
        self._waiting: list[Delta] = []
        self._echoed: set[int] = set()
        self._prompts = [self._prompt_text(i) for i in range(len(answer.prompt_ids))] if shape.echo else []

    def _prompt_text(self, prompt: int) -> str:
        """As the client wrote it; prompts of ids are decoded."""
        asked = self.answer.ask.prompts[prompt]
        text = getattr(asked, "text", None)
        return text if text is not None else self.shape.names.tokenizer.decode(self.answer.prompt_ids[prompt])

    def opening(self) -> bytes:
        return b""

    def add(self, delta: Delta) -> bytes:
        """An echo with logprobs waits for its prompt's, which come with that prompt's first choice."""
        prompt = delta.choice // self.answer.ask.params.n
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        if self._must_wait(prompt):
            self._waiting.append(delta)
            return b""
        due = [waiting for waiting in self._waiting if not self._must_wait(waiting.choice // self.answer.ask.params.n)]
        self._waiting = [waiting for waiting in self._waiting if waiting not in due]
        return b"".join(self._one(delta) for delta in (*due, delta))

    def _must_wait(self, prompt: int) -> bool:
        return self.shape.echo and self.shape.logprobs and prompt not in self._prompt_logprobs

    def _one(self, delta: Delta) -> bytes:
        text, logprobs = self._read(delta)
        if not (text or logprobs.tokens or delta.finish):
            return b""
        choice = {
            "index": delta.choice, "text": text, "logprobs": logprobs.as_dict() if self.shape.logprobs else None,
            "finish_reason": delta.finish,
        }  # fmt: skip
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._chunk(choice)

    def _read(self, delta: Delta) -> tuple[str, TextLogprobs]:
        """The text and logprobs that this delta adds to its choice, the prompt's first if it is echoed."""
        logprobs = TextLogprobs(self.shape.names)
        prompt = delta.choice // self.answer.ask.params.n
        text = delta.text
        if self.shape.echo and delta.choice not in self._echoed:
            self._echoed.add(delta.choice)
            text = self._prompts[prompt] + text
            if self.shape.logprobs:
                logprobs.add_prompt(self.answer.prompt_ids[prompt], self._prompt_logprobs[prompt])
        if self.shape.logprobs:
            shift = len(self._prompts[prompt]) if self.shape.echo else 0
            for token in delta.tokens:
                logprobs.add(token.id, shift + token.offset, token.logprobs)
        return text, logprobs

    def collect(self, delta: Delta) -> None:
        prompt = delta.choice // self.answer.ask.params.n
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        self._waiting.append(delta)

    def whole(self) -> bytes:
        for delta in self._waiting:
            text, logprobs = self._read(delta)
            self._text[delta.choice].append(text)
            self._logprobs[delta.choice].extend(logprobs)
            if delta.finish is not None:
                self._finish[delta.choice] = {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}
        return self._whole([self._choice(index) for index in range(self.num_choices)])

    def _choice(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": "".join(self._text[index]),
            "logprobs": self._logprobs[index].as_dict() if self.shape.logprobs else None,
            **self._finish[index],
        }
        if self.shape.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs_of(index // self.answer.ask.params.n)
        return choice
