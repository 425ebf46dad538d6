"""Multipart bodies by the names of their parts, as they pass by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


class PartReader:
    """Is told of every part: its name, its data piece by piece, its end. `is_whole` once the body has ended as it must.
    Raises FormParserError."""

    def __init__(self, boundary: bytes) -> None:
        self.is_whole = False
        self._header = self._value = self._name = b""
        self._parser = MultipartParser(boundary, self._callbacks())

    def feed(self, data: bytes) -> None:
        self._parser.write(data)

    def on_part(self, name: bytes) -> None: ...
    def on_data(self, data: bytes, start: int, end: int) -> None: ...
    def on_part_end(self) -> None: ...

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin, "on_header_field": self._add_field, "on_header_value": self._add_value,
            "on_header_end": self._end_header, "on_headers_finished": lambda: self.on_part(self._name),
            "on_part_data": self.on_data, "on_part_end": self.on_part_end, "on_end": self._end,
        }  # fmt: skip

    def _begin(self) -> None:
        self._header = self._value = self._name = b""

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"")
        self._header = self._value = b""

    def _end(self) -> None:
        self.is_whole = True
