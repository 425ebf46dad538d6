"""A checksum of the weights that lies beside them: whoever loads them learns in a tenth of a sha256's time that they
are still what that was computed of. It is against damage: whoever may write here could forge it.
"""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

from adapters.header import open_regular
from adapters.spec import AdapterInvalid

CHECKSUM_FILE = "weights.xxh3"
"""XXH3 of 128 bits and sha256 of the weights, as hex."""

_CHUNK_BYTES = 256 << 10
"""Read, and still in the processor's cache when it is summed."""
_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{64})\n")


def write(weights: Path, sha256: bytes) -> None:
    """Beside the weights; `sha256` is theirs. Raises AdapterInvalid for what is no plain file, OSError."""
    weights.with_name(CHECKSUM_FILE).write_text(f"{_checksum(weights).hex()} {sha256.hex()}\n")


def known_sha256(weights: Path) -> bytes | None:
    """Of weights that are what they were when their checksum was written; None if they aren't, or it isn't there."""
    try:
        with open_regular(weights.with_name(CHECKSUM_FILE)) as file:
            found = _LINE.fullmatch(file.read(128))
        if found is None or bytes.fromhex(found[1].decode()) != _checksum(weights):
            return None
    except (AdapterInvalid, OSError):
        return None
    return bytes.fromhex(found[2].decode())


def _checksum(path: Path) -> bytes:
    checksum = xxhash.xxh3_128()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with open_regular(path) as file:
        while count := file.readinto(chunk):
            checksum.update(chunk[:count])
    return checksum.digest()
