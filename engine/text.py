"""Tokenizer: text and chats → ids, ids → bytes and text. TextStream: ids of one choice → complete UTF-8, stop strings.

The only place that knows text on the engine's side; loads no torch and no transformers.
Errors: engine.vocabulary.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from engine.params import SamplingParams
from engine.protocol import Chunk, FinishReason, TokenLogprobs
from engine.template import ChatTemplate, Message, TemplateFault
from engine.vocabulary import PromptError, TextError, TokenBytes, TokenizerError

__all__ = ["PromptError", "TextDelta", "TextError", "TextStream", "TextToken", "Tokenizer", "TokenizerError"]

_BRACKETED = re.compile(r"(<.+>|\[.+\])\Z", re.DOTALL)


class Tokenizer:
    """The tokenizer of a checkpoint directory (tokenizer.json, tokenizer_config.json, chat_template.jinja).

    Safe to use from several threads; `encode` releases the interpreter lock while it works.
    """

    def __init__(self, directory: Path) -> None:
        try:
            raw = json.loads((directory / "tokenizer.json").read_text("utf-8"))
            config = _read_json(directory / "tokenizer_config.json")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{directory}: no usable tokenizer.json: {error}") from error
        added = {token["id"]: token for token in raw.get("added_tokens") or []}
        control = {i: t["content"] for i, t in added.items() if t["special"] or _BRACKETED.match(t["content"])}
        raw["truncation"] = raw["padding"] = None
        self._full = FastTokenizer.from_str(json.dumps(raw))
        raw["added_tokens"] = [token for i, token in added.items() if i not in control]
        raw["post_processor"] = None
        self._plain = FastTokenizer.from_str(json.dumps(raw))
        self._decoder = TokenBytes(self._full, raw.get("decoder"), frozenset(added))
        self._special_ids = frozenset(i for i, token in added.items() if token["special"])
        self._control = re.compile(
            "|".join(re.escape(text) for text in sorted(control.values(), key=len, reverse=True)) or r"(?!)"
        )
        self.vocab_size = self._full.get_vocab_size(with_added_tokens=True)
        self._bos_text = _token_text(config.get("bos_token"))
        self.bos_token_id = self._full.token_to_id(self._bos_text) if self._bos_text else None
        self._template = self._read_template(directory, config, control)

    def _read_template(self, directory: Path, config: dict[str, Any], control: dict[int, str]) -> ChatTemplate | None:
        source = _template_source(directory, config)
        if source is None:
            return None
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        variables = {name: text for name in names if (text := _token_text(config.get(name))) is not None}
        special = [text for i, text in control.items() if i in self._special_ids]
        tags = [text for i, text in control.items() if i not in self._special_ids]
        try:
            return ChatTemplate(source, variables, special, tags)
        except TemplateFault as error:
            raise TokenizerError(f"{directory}: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes: a text of B bytes has at least B / this many tokens."""
        return self._decoder.longest

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt: texts of control tokens in it are control tokens (its writer owns all of it). A BOS that the
        tokenizer adds is not doubled when the text brings its own."""
        ids = _ids(self._full, text, add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            assert self._bos_text is not None
            if text.startswith(self._bos_text) and not text.startswith(self._bos_text * 2):
                return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Text only: nothing in it becomes a control token, nothing is added."""
        return _ids(self._plain, text, False)

    def encode_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation: exactly what the template says, with every control token its own. Each message
        has "role" and "content" (a string). Raises PromptError with param "messages"."""
        if self._template is None:
            raise PromptError("This model has no chat template; use /v1/completions.", "messages")
        final = str(messages[-1]["content"]).strip() if continue_final_message and messages else ""
        try:
            generate = add_generation_prompt and not continue_final_message
            text, mark = self._template.render(messages, (variables or {}) | {"add_generation_prompt": generate})
        except TemplateFault as error:
            raise PromptError(f"The chat template refuses these messages: {error}", "messages") from error
        if continue_final_message:
            text = _cut_after_final(text, final, mark)
        return self._encode_rendered(text, mark, add_special_tokens)

    def _encode_rendered(self, text: str, mark: str, add_special_tokens: bool) -> list[int]:
        if mark not in text:
            return self.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        clean = ""  # text that the whole tokenizer may read: it carries no mark
        start = 0
        for end, control in [(match.start(), match[0]) for match in self._control.finditer(text)] + [(len(text), "")]:
            between = text[start:end]
            if mark in between:
                ids += self.encode(clean, add_special_tokens=add_special_tokens and not ids)
                ids += self.encode_plain(between.replace(mark, ""))
                clean = ""
            else:
                clean += between
            clean += control
            start = end + len(control)
        return ids + self.encode(clean, add_special_tokens=False) if clean else ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self._decoder[i] for i in ids if not (skip_special_tokens and i in self._special_ids))
        return self._decoder.trim_start(data).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to a text: not always a whole character. Empty for ids without a token."""
        return self._decoder[token]

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def trim_start(self, data: bytes) -> bytes:
        """`data` as the start of a text: sentencepiece vocabularies put a space before the first word."""
        return self._decoder.trim_start(data)


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token whose text has been delivered; `offset` is where it begins, in characters of the choice's text."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a chunk adds to its choice.

    tokens       those whose text is now delivered whole (never those of a stop string or a hidden special token)
    num_tokens   completion tokens of the choice so far: up to and with the one that completed a stop
    finish       set once; later chunks of the choice are ignored
    stop_reason  the stop string or stop token id that ended it; None for end-of-sequence and length
    """

    text: str
    tokens: tuple[TextToken, ...]
    num_tokens: int
    finish: FinishReason | None = None
    stop_reason: int | str | None = None


class TextStream:
    """The text of one choice, from the engine's chunks.

    Only complete characters leave it, and the concatenation of all deltas is the decode of all ids (without an
    incomplete last character). Text is held back only while it is a real proper prefix of a stop string, and delivered
    when it turns out to be none. Only generated text is searched; the match that ends first wins, and of those that
    end together the longest; what min_tokens protects is not searched.
    `starts_text`: the output begins a text of its own (a chat turn) rather than continuing the prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, starts_text: bool = False) -> None:
        self.num_tokens = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._params = params
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(stop) for stop in params.stop_strings]
        self._at_start = starts_text
        self._held = ""  # decoded, not delivered
        self._delivered = 0  # characters
        self._tokens: deque[tuple[TextToken, int]] = deque()  # not delivered, with where their text ends
        self._incomplete = 0  # of those at the right end, how many wait for the rest of a character

    def push(self, chunk: Chunk) -> TextDelta:
        """Raises nothing: ids that have no token add no text."""
        if self.finished:
            return TextDelta("", (), self.num_tokens)
        for position, token in enumerate(chunk.ids):
            self.num_tokens += 1
            stop = self._add(token, chunk.logprobs[position] if chunk.logprobs else None, chunk.stop_id)
            if stop is not None:
                return self._end("stop", stop)
        if chunk.finish is not None:
            is_stop_token = chunk.stop_id in (self._params.stop_token_ids or ())
            return self._end(chunk.finish, chunk.stop_id if is_stop_token else None)
        return self._deliver(max((matcher.state for matcher in self._matchers), default=0))

    def _add(self, token: int, logprobs: TokenLogprobs | None, stop_id: int | None) -> str | None:
        """Appends one token's text → the stop string that it completes; `_held` then ends where the answer does."""
        if token == stop_id or (self._params.skip_special_tokens and self._tokenizer.is_special(token)):
            return None
        data = self._tokenizer.token_bytes(token)
        if self._at_start and data:
            data = self._tokenizer.trim_start(data)
            self._at_start = False
        begin = self._delivered + len(self._held)
        text = self._utf8.decode(data)
        end = begin + len(text)
        if text:
            self._settle_incomplete(end)
        waits = bool(self._utf8.getstate()[0])
        self._tokens.append((TextToken(token, begin, logprobs), end + waits))
        self._incomplete += waits
        self._held += text
        return self._search(text, end) if self.num_tokens >= self._params.min_tokens else None

    def _settle_incomplete(self, end: int) -> None:
        """The character that the last tokens waited for is complete: their text ends with it."""
        for back in range(1, self._incomplete + 1):
            token, _ = self._tokens[-back]
            self._tokens[-back] = (token, min(token.offset + 1, end))
        self._incomplete = 0

    def _search(self, text: str, end: int) -> str | None:
        if not self._matchers:
            return None
        for position, char in enumerate(text, start=end - len(text) + 1):
            found = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if found:
                stop = max(found, key=len)
                keep = position if self._params.include_stop_str_in_output else position - len(stop)
                self._held = self._held[: keep - self._delivered]
                return stop
        return None

    def _end(self, finish: FinishReason, stop_reason: int | str | None) -> TextDelta:
        self.finished = True
        delta = self._deliver(0)
        return TextDelta(delta.text, delta.tokens, self.num_tokens, finish, stop_reason)

    def _deliver(self, num_held: int) -> TextDelta:
        cut = len(self._held) - num_held
        text, self._held = self._held[:cut], self._held[cut:]
        self._delivered += len(text)
        tokens = []
        while self._tokens and (
            self._tokens[0][1] <= self._delivered or (self.finished and self._tokens[0][0].offset < self._delivered)
        ):
            tokens.append(self._tokens.popleft()[0])
        self._incomplete = min(self._incomplete, len(self._tokens))
        return TextDelta(text, tuple(tokens), self.num_tokens)


class _StopMatcher:
    """Knuth-Morris-Pratt: `state` is the length of the longest proper prefix of `stop` that ends the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fail = [0] * len(stop)
        for i in range(1, len(stop)):
            self._fail[i] = self._step(self._fail[i - 1], stop[i])

    def _step(self, state: int, char: str) -> int:
        while state and self.stop[state] != char:
            state = self._fail[state - 1]
        return state + (self.stop[state] == char)

    def advance(self, char: str) -> bool:
        """True when `char` completes the stop string."""
        self.state = self._step(self.state, char)
        return self.state == len(self.stop)


def _ids(tokenizer: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        encodings = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError) as error:  # the latter, about its input, is what a str can cause only so
        raise PromptError("The text holds a lone surrogate, which is no character.") from error
    return list(encodings[0].ids)


def _cut_after_final(text: str, final: str, mark: str) -> str:
    """The rendered text up to the end of the last message's content, so that the model goes on with it."""
    plain = text.replace(mark, "")
    at = plain.rfind(final)
    if not final or at < 0:
        raise PromptError("The chat template changes the final message, so that it can't be continued.", "messages")
    wanted = at + len(final)
    for position, char in enumerate(text):
        if wanted == 0:
            return text[:position]
        wanted -= char != mark
    return text


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json's; of several named ones, "default"."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
