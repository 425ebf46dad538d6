"""Fingerprints of request bodies: equal for a request that is sent again, however its client wraps it."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from gateway.multipart import PartReader


def of_json(query: bytes, value: Any) -> str:
    """Of a JSON body, however its keys are ordered, and the query."""
    asked = [query.decode("latin-1"), value]
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()


class MultipartFingerprint(PartReader):
    """Of a multipart body as it passes by: the names and contents of its parts, in their order. Boundaries, which are
    new every time, and file names don't count. Keeps nothing but the hash."""

    def __init__(self, query: bytes, content_type: str) -> None:
        _, options = parse_options_header(content_type)
        super().__init__(options.get(b"boundary", b"-"))
        self._hash = hashlib.sha256(query)
        self._part = hashlib.sha256()

    def feed(self, data: bytes) -> None:
        """A body that is no multipart has no fingerprint: its route refuses it."""
        try:
            super().feed(data)
        except FormParserError:
            self.is_whole = False

    @property
    def value(self) -> str | None:
        """None unless the body has been seen to its end."""
        return self._hash.hexdigest() if self.is_whole else None

    def on_part(self, name: bytes) -> None:
        self._hash.update(hashlib.sha256(name).digest())
        self._part = hashlib.sha256()

    def on_data(self, data: bytes, start: int, end: int) -> None:
        self._part.update(memoryview(data)[start:end])

    def on_part_end(self) -> None:
        self._hash.update(self._part.digest())
