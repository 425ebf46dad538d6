"""Upload: the multipart body of an adapter, streamed into a stage of the store. Nothing of the client becomes a path.

Parts: `config` (adapter_config.json), `weights` (adapter_model.safetensors) and, where a new adapter is made, `name`.
Sharded weights are several parts `weights` and their `index` (adapter_model.safetensors.index.json). What a version
brings along (gateway/companions.py) and `probes` may be missing. File names that a client gives are ignored. Memory
does not grow with the body. UploadGate bounds how many are taken in at a time; the others wait unread.

    UploadError         the body can't be understood; has .code, .message, .param
    ├── UploadTooLarge  it, or one part, is above its limit
    └── UploadTooSlow   it has not arrived in time
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from weakref import WeakValueDictionary

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from adapters.config import MAX_CONFIG_BYTES
from adapters.new_tokens import MAX_TOKENIZER_BYTES, TOKENIZER_FILE
from adapters.shards import INDEX_FILE, MAX_INDEX_BYTES, stage_file
from adapters.storage import CONFIG_FILE, MAX_COMPANION_BYTES, WEIGHTS_FILE
from gateway.companions import PARTS as COMPANIONS
from gateway.multipart import PartReader

MAX_NAME_BYTES = 1 << 10
MAX_PROBES_BYTES = 256 << 10
MAX_FRAMING_BYTES = 16 << 10
"""Boundaries and part headers of a whole body."""
LIMITS = {
    "config": MAX_CONFIG_BYTES, "index": MAX_INDEX_BYTES, "tokenizer": MAX_TOKENIZER_BYTES,
    "probes": MAX_PROBES_BYTES,
    **dict.fromkeys(COMPANIONS, MAX_COMPANION_BYTES),
}  # fmt: skip
MAX_REST_BYTES = sum(LIMITS.values()) + MAX_NAME_BYTES + MAX_FRAMING_BYTES
"""All but the weights."""
WRITE_BYTES = 1 << 20
IDLE_S = 30.0
"""A client that sends nothing for so long has gone."""
MAX_BODIES = 16
MAX_BODIES_PER_OWNER = 4
MAX_CHECKS = 2
"""Per worker: bodies that are read, of all and of one tenant; adapters that are checked (each may take 1 GiB)."""
OPTIONAL = {"tokenizer": TOKENIZER_FILE, **COMPANIONS}
FILES = {"config": CONFIG_FILE, "weights": WEIGHTS_FILE, "index": INDEX_FILE, **OPTIONAL}
MAX_WEIGHTS = 64
"""Shards of one upload."""


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


def check_length(headers: Mapping[str, str], max_bytes: int) -> int:
    """Refuses a body by its Content-Length, before any of it is read. → bytes of weights that it has at least."""
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes + MAX_REST_BYTES:
        raise UploadTooLarge("request_too_large", f"An adapter may have at most {max_bytes} bytes.", "weights")
    return max(0, int(length) - MAX_REST_BYTES) if length.isdigit() else 0


@dataclass(frozen=True)
class Received:
    """What of an upload is no file: `name` (None unless it was wanted), `probes` (None where there is no such part)."""

    name: str | None
    probes: bytes | None = None


async def receive(
    chunks: AsyncIterator[bytes], content_type: str, stage: Path, max_bytes: int, wants_name: bool
) -> Received:
    """Reads the body into `stage`; what is no file is returned. `max_bytes` is for weights."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise UploadError("invalid_content_type", "Send the adapter as multipart/form-data.")
    limits = LIMITS | {"weights": max_bytes} | ({"name": MAX_NAME_BYTES} if wants_name else {})
    try:
        parts = _Parts(options[b"boundary"], limits, stage)
        async for chunk in chunks:
            parts.feed(chunk)
            if parts.num_pending >= WRITE_BYTES:
                await asyncio.to_thread(parts.flush)
    except FormParserError as error:
        raise UploadError("invalid_multipart", f"The multipart body is malformed: {error}"[:300]) from error
    await asyncio.to_thread(parts.flush)
    return parts.received()


class _Parts(PartReader):
    """What has been found so far. Only `weights` may come more than once."""

    def __init__(self, boundary: bytes, limits: Mapping[str, int], stage: Path) -> None:
        super().__init__(boundary)
        self.num_pending = 0
        self._limits = limits
        self._stage = stage
        self._sizes: dict[str, int] = {}
        self._num_weights = 0
        self._pending: list[tuple[str, bytes]] = []  # file, what to append to it
        self._texts: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._part = ""

    def flush(self) -> None:
        for name, found in groupby(self._pending, key=itemgetter(0)):
            with (self._stage / name).open("ab") as file:
                file.writelines(data for _, data in found)
        self._pending.clear()
        self.num_pending = 0

    def received(self) -> Received:
        """What is no file, once everything that must be there is known to be there."""
        if not self.is_whole:
            raise UploadError("invalid_multipart", "The multipart body ends too early.")
        for part in self._limits:
            is_needed = part not in (*OPTIONAL, "probes") and (part != "index" or self._num_weights > 1)
            if part not in self._sizes and is_needed:
                raise UploadError("missing_required_parameter", f"Missing required part: '{part}'.", part)
        probes = bytes(self._texts["probes"]) if "probes" in self._sizes else None
        if "name" not in self._limits:
            return Received(None, probes)
        try:
            return Received(self._texts["name"].decode(), probes)
        except UnicodeDecodeError:
            raise UploadError("invalid_value", "The name is not UTF-8.", "name") from None

    def on_part(self, name: bytes) -> None:
        self._part = name.decode(errors="replace")
        if self._part not in self._limits:
            known = ", ".join(self._limits)
            raise UploadError("unknown_parameter", f"Unknown part; expected: {known}.", self._part[:64] or None)
        if self._part == "weights":
            self._num_weights += 1
            if self._num_weights > MAX_WEIGHTS:
                raise UploadError("invalid_value", f"There may be at most {MAX_WEIGHTS} parts of weights.", "weights")
        elif self._part in self._sizes:
            raise UploadError("invalid_value", f"The part '{self._part}' was given twice.", self._part)
        self._sizes.setdefault(self._part, 0)
        if self._part in FILES:
            self._pending.append((self._file(), b""))  # there is a file, also if the part is empty

    def on_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        self._sizes[part] += end - start
        if self._sizes[part] > self._limits[part]:
            limit = self._limits[part]
            raise UploadTooLarge("request_too_large", f"The part '{part}' may have at most {limit} bytes.", part)
        if part not in FILES:
            self._texts[part] += data[start:end]
            return
        self._pending.append((self._file(), data[start:end]))
        self.num_pending += end - start

    def _file(self) -> str:
        return stage_file(self._num_weights - 1) if self._part == "weights" else FILES[self._part]
