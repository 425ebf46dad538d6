"""TextStream: ids of one choice → complete UTF-8, its tokens, stop strings. Knows no prompt and no template."""

from __future__ import annotations

import codecs
from collections import deque

import msgspec

from engine.params import SamplingParams
from engine.protocol import Chunk, FinishReason, TokenLogprobs
from engine.text import Tokenizer


class TextToken(msgspec.Struct, frozen=True, gc=False):
    """A token whose text has been delivered; `offset` is where it begins, in characters of the choice's text."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What a chunk adds to its choice.

    tokens       where chunks carry logprobs, those whose text is now delivered whole (never those of a stop string or
                 a hidden special token)
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

    def push(self, chunk: Chunk) -> TextDelta:
        """Raises nothing: ids that have no token add no text."""
        if self.finished:
            return TextDelta("", (), self.num_tokens)
        if self._matchers or chunk.logprobs is not None:
            for position, token in enumerate(chunk.ids):
                self.num_tokens += 1
                stop = self._add(token, chunk.logprobs[position] if chunk.logprobs else None, chunk.stop_id)
                if stop is not None:
                    return self._end("stop", stop)
        else:
            self._add_all(chunk)
        if chunk.finish is not None:
            is_stop_token = chunk.stop_id in (self._params.stop_token_ids or ())
            return self._end(chunk.finish, chunk.stop_id if is_stop_token else None)
        return self._deliver(max((matcher.state for matcher in self._matchers), default=0))

    def _add(self, token: int, logprobs: TokenLogprobs | None, stop_id: int | None) -> str | None:
        """Appends one token's text → the stop string that it completes; `_held` then ends where the answer does."""
        if self._is_hidden(token, stop_id):
            return None
        data = self._trimmed(self._tokenizer.token_bytes(token))
        begin = self._delivered + len(self._held)
        text = self._utf8.decode(data)
        end = begin + len(text)
        waits = bool(self._utf8.getstate()[0])
        self._tokens.append((TextToken(token, begin, logprobs), end + waits))  # it ends in the character to come
        self._held += text
        return self._search(text, end) if self.num_tokens >= self._params.min_tokens else None

    def _add_all(self, chunk: Chunk) -> None:
        """Where no text is searched and no token told: the ids' bytes in one piece."""
        self.num_tokens += len(chunk.ids)
        shown = [token for token in chunk.ids if not self._is_hidden(token, chunk.stop_id)]
        self._held += self._utf8.decode(self._trimmed(b"".join(map(self._tokenizer.token_bytes, shown))))

    def _is_hidden(self, token: int, stop_id: int | None) -> bool:
        return token == stop_id or (self._params.skip_special_tokens and self._tokenizer.is_special(token))

    def _trimmed(self, data: bytes) -> bytes:
        if self._at_start and data:
            self._at_start = False
            return self._tokenizer.trim_start(data)
        return data

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
