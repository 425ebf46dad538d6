"""New tokens: what an adapter's tokenizer.json has beyond its base's. Everything else in it must be the base's own, so
that a stranger's file never decides how texts are split: only these few words are kept of it. Knows no tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.header import open_regular
from adapters.spec import (
    AdapterError,
    AdapterInvalid,
    AdapterTooLarge,
    AdapterUnsupported,
    BaseShape,
    NewToken,
    shown,
)

TOKENIZER_FILE = "tokenizer.json"
TOKENS_FILE = "new_tokens.json"
MAX_TOKENIZER_BYTES = 64 << 20
MAX_NEW_TOKENS = 4096
MAX_TOKEN_CHARS = 256


def keep_new_tokens(directory: Path, tokens: Sequence[NewToken]) -> None:
    """All that stays of the tokenizer in `directory` is TOKENS_FILE, or nothing where it has no new tokens."""
    if tokens:
        (directory / TOKENS_FILE).write_bytes(msgspec.json.encode(tokens))
    (directory / TOKENIZER_FILE).unlink(missing_ok=True)


def parse_new_tokens(data: bytes) -> tuple[NewToken, ...]:
    """The content of TOKENS_FILE. Raises AdapterInvalid."""
    try:
        return msgspec.json.decode(data, type=tuple[NewToken, ...])
    except msgspec.DecodeError as error:
        raise AdapterInvalid("tokenizer_invalid", f"{TOKENS_FILE}: {error}", TOKENS_FILE) from None


def is_of_tokenizer(sha256: str, path: Path) -> bool:
    """This is the sum (hex) of a TOKENS_FILE with the last tokens, by id, that the tokenizer in `path` adds; the base's
    own come before them. Raises AdapterInvalid, AdapterTooLarge."""
    if not path.is_file():
        return False
    tokens = sorted(_added(_read(path)), key=lambda token: token.id)
    return any(
        hashlib.sha256(msgspec.json.encode(tuple(tokens[first:]))).hexdigest() == sha256
        for first in range(max(0, len(tokens) - MAX_NEW_TOKENS), len(tokens))
    )


def read_new_tokens(path: Path, shape: BaseShape) -> tuple[NewToken, ...]:
    """By id. `shape` has grown by the adapter's own tokens.

    Raises AdapterInvalid, AdapterTooLarge, AdapterUnsupported.
    """
    ours = _read(path)
    try:
        base = _read(Path(shape.weights_dir) / TOKENIZER_FILE) if shape.weights_dir else None
    except (OSError, AdapterError):
        base = None
    if base is None:
        raise AdapterUnsupported("base_unknown", "the base's own tokenizer can't be read", TOKENIZER_FILE)
    _check_same(ours, base)
    known = _vocabulary(base)
    found = sorted((token for token in _added(ours) if known.get(token.content) != token.id), key=lambda each: each.id)
    if len(found) > MAX_NEW_TOKENS:
        raise AdapterTooLarge("too_many_tokens", f"{len(found)} new tokens; at most {MAX_NEW_TOKENS} are allowed")
    missing = {token.content for token in _added(base)} - {token.content for token in _added(ours)}
    if missing:
        raise AdapterUnsupported("tokenizer_changed", f"it lacks the base's {shown(min(missing))}", TOKENIZER_FILE)
    _check_places(found, known, shape.vocab_size)
    return tuple(found)


def _read(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        raw = file.read(MAX_TOKENIZER_BYTES + 1)
    if len(raw) > MAX_TOKENIZER_BYTES:
        raise AdapterTooLarge("tokenizer_too_large", f"at most {MAX_TOKENIZER_BYTES} bytes", TOKENIZER_FILE)
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise AdapterInvalid("tokenizer_invalid", "it is not the file of a tokenizer", TOKENIZER_FILE)
    return parsed


def _check_same(ours: dict[str, Any], base: dict[str, Any]) -> None:
    for name, mine, theirs in (
        *((key, ours.get(key), base.get(key)) for key in ("normalizer", "pre_tokenizer", "decoder")),
        *((f"model.{key}", ours["model"].get(key), base["model"].get(key)) for key in ("type", "vocab")),
        ("model.merges", _merges(ours), _merges(base)),
    ):
        if mine != theirs:
            raise AdapterUnsupported(
                "tokenizer_changed", f"{name} is not the base's: only new tokens can be added", TOKENIZER_FILE
            )


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    """Older files have "a b", newer ones ["a", "b"]."""
    merges = tokenizer["model"].get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(map(str, pair)) for pair in merges]


def _vocabulary(tokenizer: dict[str, Any]) -> Mapping[str, int]:
    vocabulary = tokenizer["model"].get("vocab")
    if isinstance(vocabulary, list):  # Unigram: [token, score], by id
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    return {**(vocabulary or {}), **{token.content: token.id for token in _added(tokenizer)}}


def _added(tokenizer: dict[str, Any]) -> Iterator[NewToken]:
    for entry in tokenizer.get("added_tokens") or ():
        try:
            named = {name: entry.get(name, False) for name in ("special", "lstrip", "rstrip")}
            yield msgspec.convert((entry["id"], entry["content"], *named.values()), NewToken)
        except (msgspec.ValidationError, KeyError, TypeError, AttributeError):
            raise AdapterInvalid("tokenizer_invalid", "added_tokens has a faulty entry", TOKENIZER_FILE) from None


def _check_places(found: list[NewToken], known: Mapping[str, int], vocab_size: int) -> None:
    taken = set(known.values())
    contents = set(known)
    for token in found:
        text = shown(token.content, 40)
        if not 0 < len(token.content) <= MAX_TOKEN_CHARS or token.content.isspace():
            raise AdapterInvalid("tokenizer_invalid", f"a token must have 1 to {MAX_TOKEN_CHARS} characters", text)
        if token.id in taken or token.content in contents:
            raise AdapterInvalid("tokenizer_invalid", f"{text} ({token.id}) is another token of the base", text)
        if not 0 <= token.id < vocab_size:
            raise AdapterInvalid("tokenizer_invalid", f"{text} has id {token.id}, of {vocab_size}", text)
        taken.add(token.id)
        contents.add(token.content)
