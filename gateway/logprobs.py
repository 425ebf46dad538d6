"""Log-probabilities as OpenAI writes them: for chats, for completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import TokenLogprobs
from engine.text import Tokenizer
from engine.text_stream import TextToken

VERY_UNLIKELY = -9999.0
"""OpenAI's number for −∞, which JSON does not have."""


@dataclass(frozen=True)
class Names:
    """How tokens are written: their text, or `token_id:7` when the client asked for ids."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def in_chat(self, token: int) -> str:
        """Bytes that are no whole character are shown escaped, `\\xf0\\x9f`; `bytes` beside it has them true."""
        return self._name(token, "")

    def in_text(self, token: int) -> str:
        """As in chats, but marked: `bytes:\\xf0\\x9f`."""
        return self._name(token, "bytes:")

    def _name(self, token: int, mark: str) -> str:
        if self.as_ids:
            return f"token_id:{token}"
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return mark + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """NaN is not less than anything either."""
    return logprob if logprob > VERY_UNLIKELY else VERY_UNLIKELY


def chat_logprobs(names: Names, tokens: Iterable[TextToken]) -> list[dict[str, Any]]:
    """`content` of a chat choice's logprobs: every token with its own alternatives."""
    return [
        {
            **_chat_entry(names, token.id, token.logprobs.logprob),
            "top_logprobs": [
                _chat_entry(names, other, logprob)
                for other, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
            ],
        }
        for token in tokens
        if token.logprobs is not None
    ]


def _chat_entry(names: Names, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": names.in_chat(token),
        "logprob": finite(logprob),
        "bytes": list(names.tokenizer.token_bytes(token)),
    }


@dataclass
class TextLogprobs:
    """A completion choice's logprobs: four lists of equal length."""

    names: Names
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: int, offset: int, logprobs: TokenLogprobs | None) -> None:
        """`logprobs` None: the first token of a prompt has none."""
        name = self.names.in_text(token)
        self.tokens.append(name)
        self.text_offset.append(offset)
        if logprobs is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        top = {self.names.in_text(other): finite(value) for other, value in pairs}
        self.token_logprobs.append(finite(logprobs.logprob))
        self.top_logprobs.append({name: finite(logprobs.logprob)} | top)

    def extend(self, other: TextLogprobs) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def add_prompt(self, ids: list[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        for token, offset, entry in zip(ids, prompt_offsets(self.names.tokenizer, ids), logprobs, strict=True):
            self.add(token, offset, entry)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def prompt_offsets(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Where each token begins, in characters of the prompt's text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, position = [], 0
    for token in ids:
        offsets.append(position)
        if not tokenizer.is_special(token):
            position += len(decoder.decode(tokenizer.token_bytes(token)))
    return offsets


def prompt_logprobs(
    names: Names, ids: list[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form: per prompt token {token id: {logprob, rank, decoded_token}}; rank null where it is unknown."""
    found: list[dict[str, dict[str, Any]] | None] = []
    for token, entry in zip(ids, logprobs, strict=True):
        if entry is None:
            found.append(None)
            continue
        values = {str(token): _ranked(names, token, entry.logprob, None)}
        for rank, (other, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            values[str(other)] = _ranked(names, other, value, rank)
        found.append(values)
    return found


def _ranked(names: Names, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.in_chat(token)}
