"""Upload: the multipart body of an adapter, streamed into a stage of the store. Nothing of the client becomes a path.

Parts: `config` (adapter_config.json), `weights` (adapter_model.safetensors) and, where a new adapter is made, `name`.
File names that a client gives are ignored. Memory does not grow with the body. UploadGate bounds how many are taken in
at a time; the others wait unread.

    UploadError         the body can't be understood; has .code, .message, .param
    ├── UploadTooLarge  it, or one part, is above its limit
    └── UploadTooSlow   it has not arrived in time
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from weakref import WeakValueDictionary

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from adapters.config import MAX_CONFIG_BYTES
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_NAME_BYTES = 1 << 10
MAX_FRAMING_BYTES = 16 << 10
"""Boundaries and part headers of a whole body."""
WRITE_BYTES = 1 << 20
IDLE_S = 30.0
"""A client that sends nothing for so long has gone."""
MAX_BODIES = 16
MAX_BODIES_PER_OWNER = 4
MAX_CHECKS = 2
"""Per worker: bodies that are read, of all and of one tenant; adapters that are checked (each may take 1 GiB)."""
FILES = {"config": CONFIG_FILE, "weights": WEIGHTS_FILE}


class UploadError(Exception):
    """The body is not what it should be; `param` names the part."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class UploadTooLarge(UploadError):
    """Above a limit."""


class UploadTooSlow(UploadError):
    """Out of time."""


class UploadGate:
    """Lets so many uploads of one worker in at a time: `async with gate.body(owner):`, `async with gate.checks:`."""

    def __init__(self) -> None:
        self.checks = asyncio.Semaphore(MAX_CHECKS)
        self._bodies = asyncio.Semaphore(MAX_BODIES)
        self._owners: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def body(self, owner: str) -> AsyncIterator[None]:
        """One owner's slow uploads leave room for the others'."""
        own = self._owners.setdefault(owner, asyncio.Semaphore(MAX_BODIES_PER_OWNER))
        async with own, self._bodies:
            yield


async def in_time(chunks: AsyncIterator[bytes], total_s: float, idle_s: float = IDLE_S) -> AsyncIterator[bytes]:
    """The same chunks. Raises UploadTooSlow when one takes longer than `idle_s`, or all together than `total_s`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + total_s
    while True:
        try:
            async with asyncio.timeout(min(idle_s, end - loop.time())):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise UploadTooSlow("timeout", "The upload did not arrive in time.") from None
        yield chunk


def check_length(headers: Mapping[str, str], max_bytes: int) -> None:
    """Refuses a body by its Content-Length, before any of it is read."""
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes + MAX_CONFIG_BYTES + MAX_NAME_BYTES + MAX_FRAMING_BYTES:
        raise UploadTooLarge("request_too_large", f"An adapter may have at most {max_bytes} bytes.", "weights")


async def receive(
    chunks: AsyncIterator[bytes], content_type: str, stage: Path, max_bytes: int, wants_name: bool
) -> str | None:
    """Reads the body into `stage`; returns the part `name` (None unless `wants_name`). `max_bytes` is for weights."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise UploadError("invalid_content_type", "Send the adapter as multipart/form-data.")
    limits = {"config": MAX_CONFIG_BYTES, "weights": max_bytes} | ({"name": MAX_NAME_BYTES} if wants_name else {})
    with (stage / CONFIG_FILE).open("xb") as config, (stage / WEIGHTS_FILE).open("xb") as weights:
        parts = _Parts(limits, {"config": config, "weights": weights})
        try:
            parser = MultipartParser(options[b"boundary"], parts.callbacks())
            async for chunk in chunks:
                parser.write(chunk)
                if parts.num_pending >= WRITE_BYTES:
                    await asyncio.to_thread(parts.flush)
        except FormParserError as error:
            raise UploadError("invalid_multipart", f"The multipart body is malformed: {error}"[:300]) from error
        await asyncio.to_thread(parts.flush)
    return parts.name()


class _Parts:
    """What the parser has found so far."""

    def __init__(self, limits: Mapping[str, int], files: Mapping[str, BinaryIO]) -> None:
        self.num_pending = 0
        self._limits = limits
        self._files = files
        self._sizes: dict[str, int] = {}
        self._pending: list[tuple[BinaryIO, bytes]] = []
        self._name = bytearray()
        self._header = b""
        self._value = b""
        self._part = ""
        self._is_whole = False

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_field,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_end": self._end,
        }

    def flush(self) -> None:
        for file, data in self._pending:
            file.write(data)
        self._pending.clear()
        self.num_pending = 0

    def name(self) -> str | None:
        """The part `name`, once everything that must be there is known to be there."""
        if not self._is_whole:
            raise UploadError("invalid_multipart", "The multipart body ends too early.")
        for part in self._limits:
            if part not in self._sizes:
                raise UploadError("missing_required_parameter", f"Missing required part: '{part}'.", part)
        if "name" not in self._limits:
            return None
        try:
            return self._name.decode()
        except UnicodeDecodeError:
            raise UploadError("invalid_value", "The name is not UTF-8.", "name") from None

    def _begin(self) -> None:
        self._header = self._value = b""
        self._part = ""

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._part = options.get(b"name", b"").decode(errors="replace")
        self._header = self._value = b""

    def _end_headers(self) -> None:
        if self._part not in self._limits:
            known = ", ".join(self._limits)
            raise UploadError("unknown_parameter", f"Unknown part; expected: {known}.", self._part[:64] or None)
        if self._part in self._sizes:
            raise UploadError("invalid_value", f"The part '{self._part}' was given twice.", self._part)
        self._sizes[self._part] = 0

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        self._sizes[part] += end - start
        if self._sizes[part] > self._limits[part]:
            limit = self._limits[part]
            raise UploadTooLarge("request_too_large", f"The part '{part}' may have at most {limit} bytes.", part)
        if part == "name":
            self._name += data[start:end]
            return
        self._pending.append((self._files[part], data[start:end]))
        self.num_pending += end - start

    def _end(self) -> None:
        self._is_whole = True
