"""NewTokens: words that an adapter adds to a tokenizer, found in texts. Knows no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import re2

from adapters.spec import NewToken

_SPACE = re.compile(r"\s*")
MEMORY_BYTES = 64 << 20
"""Of RE2, for thousands of long tokens."""


class NewTokens:
    """Splits a text at new tokens: the first to begin wins, and of those that begin together the longest, as in
    Hugging Face's tokenizers. In linear time: tokens and texts are a tenant's, the gateway is everybody's."""

    def __init__(self, tokens: Sequence[NewToken]) -> None:
        self._tokens = {token.content: token for token in tokens}
        options = re2.Options()
        options.max_mem = MEMORY_BYTES
        contents = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re2.compile("|".join(map(re2.escape, contents)), options) if tokens else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of text, none empty, and ids. A text with a lone surrogate is one piece: it is no text, which the
        tokenizer says."""
        start = 0
        for match in self._matches(text):
            token = self._tokens[match[0]]
            if match.start() < start:  # it begins in white space that the one before took along
                continue
            piece = text[start : match.start()]
            if token.lstrip:
                piece = piece.rstrip()
            if piece:
                yield piece
            yield token.id
            start = match.end()
            if token.rstrip:
                space = _SPACE.match(text, start)
                assert space is not None
                start = space.end()
        if start < len(text):
            yield text[start:]

    def _matches(self, text: str) -> list[Any]:
        try:
            return [] if self._pattern is None else list(self._pattern.finditer(text))
        except UnicodeEncodeError:
            return []


def is_splittable(parts: Iterable[object]) -> bool:
    """Whether a tokenizer with this normaliser and pre-tokenizer encodes a text as it does its pieces: none that does
    something at a text's begin or end."""
    for part in parts:
        if not isinstance(part, dict):
            continue
        inner = [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
        at_begin = part.get("type") in ("Prepend", "Strip") or part.get("add_prefix_space") is True
        if at_begin or part.get("prepend_scheme", "never") != "never" or not is_splittable(inner):
            return False
    return True
