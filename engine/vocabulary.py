"""TokenBytes: a vocabulary's ids as bytes; and the errors of everything that turns text into ids. Knows no template.

TextError              text can't become tokens; has .message
├── TokenizerError     the checkpoint's tokenizer files are missing, or of a kind that we don't know
└── PromptError        this prompt can't be encoded; .param names the field: the template refused the messages
"""

from __future__ import annotations

import copy
import re
from typing import Any

from tokenizers import Tokenizer as FastTokenizer


class TextError(Exception):
    """Text can't become tokens."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class TokenizerError(TextError):
    """The checkpoint's tokenizer can't be used."""


class PromptError(TextError):
    """This prompt can't be encoded."""


class TokenBytes:
    """id → bytes, for the two kinds of vocabulary there are: byte-level BPE (each character stands for a byte) and
    sentencepiece (U+2581 is a space, `<0xE4>` a byte)."""

    def __init__(self, tokenizer: FastTokenizer, decoder: dict[str, Any] | None, added: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._added = added
        self._cache: dict[int, bytes] = {}
        kinds = _decoder_kinds(decoder)
        self._byte_level = "ByteLevel" in kinds
        self._strips = not self._byte_level and bool({"Strip", "Metaspace"} & kinds.keys())
        if not self._byte_level and not {"ByteFallback", "Metaspace"} & kinds.keys():
            raise TokenizerError(f"tokenizer.json: decoder {sorted(kinds)} is neither byte-level nor sentencepiece")
        self.longest = max(len(self[i]) for i in tokenizer.get_vocab(with_added_tokens=True).values())
        self._cache.clear()

    def __getitem__(self, token: int) -> bytes:
        data = self._cache.get(token)
        if data is None:
            data = self._cache[token] = self._read(token)
        return data

    def grown(self, tokens: dict[int, bytes]) -> TokenBytes:
        """The same with more tokens."""
        other = copy.copy(self)
        other._cache = dict(tokens)
        other.longest = max(self.longest, *map(len, tokens.values()))
        return other

    def _read(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        if not self._byte_level:
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
            return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()
        if all(char in _BYTE_OF for char in text):
            return bytes(_BYTE_OF[char] for char in text)
        return text.encode()

    def trim_start(self, data: bytes) -> bytes:
        return data[1:] if self._strips and data.startswith(b" ") else data


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 is itself, the other 68 bytes are U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _decoder_kinds(decoder: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    if decoder is None:
        return {}
    parts = decoder.get("decoders") or [decoder]
    return {part["type"]: part for part in parts}
