"""The form of a key, and the pepper that its digest is sealed with. Pure functions: no I/O.

    chorus_live_<public id>_<secret>_<checksum>

The prefix is what secret scanners look for; the public id finds the row and may be logged; the secret has 256 bits; the
checksum (CRC-32 of all before it) rejects a typo without I/O. All three are base 62.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

PREFIX = "chorus_live"
ADMIN_PREFIX = "chorus_admin"
_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_ID_LENGTH, _SECRET_LENGTH, _CHECK_LENGTH = 16, 43, 6
_FORM = re.compile(r"(chorus_live|chorus_admin)_([0-9A-Za-z]{16})_[0-9A-Za-z]{43}_([0-9A-Za-z]{6})")


def _random(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def checksum(body: str) -> str:
    value, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECK_LENGTH):
        value, digit = divmod(value, 62)
        digits = _BASE62[digit] + digits
    return digits


def make_key(prefix: str = PREFIX) -> tuple[str, str]:
    """A new (public id, key)."""
    key_id = _random(_ID_LENGTH)
    body = f"{prefix}_{key_id}_{_random(_SECRET_LENGTH)}"
    return key_id, f"{body}_{checksum(body)}"


def public_id(key: str, prefix: str = PREFIX) -> str | None:
    """The public id in a well-formed key; None if it can't be a key of ours."""
    match = _FORM.fullmatch(key) if key.startswith(prefix) else None
    if match is None or match[1] != prefix or not hmac.compare_digest(checksum(key.rpartition("_")[0]), match[3]):
        return None
    return match[2]


def sha256_of(key: str) -> bytes:
    """Of the bytes that were sent: HTTP headers are read as Latin-1, whatever they were written in."""
    try:
        return hashlib.sha256(key.encode("latin-1")).digest()
    except UnicodeEncodeError:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class Pepper:
    """Server-side secrets by version; new digests use the highest, old ones open with their own."""

    secrets: Mapping[int, bytes] = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Pepper:
        """`1:first-secret,2:second-secret`; a text without versions is version 1."""
        if not text:
            raise ValueError("the pepper is empty")
        if not re.match(r"\d+:", text):
            return cls({1: text.encode()})
        pairs = (part.strip().partition(":") for part in text.split(","))
        found = {int(version): secret.encode() for version, _, secret in pairs}
        if not all(found.values()):
            raise ValueError("a pepper version has no secret")
        return cls(found)

    def seal(self, sha256: bytes) -> tuple[int, str]:
        """(version, hex digest) to store for a key with this SHA-256."""
        version = max(self.secrets)
        return version, hmac.new(self.secrets[version], sha256, hashlib.sha256).hexdigest()

    def seals(self, sha256: bytes) -> list[str]:
        """What seal() of each version would give: to find a key that has no public id."""
        return [hmac.new(secret, sha256, hashlib.sha256).hexdigest() for secret in self.secrets.values()]

    def opens(self, digest: str, version: int, sha256: bytes) -> bool:
        """Is `digest` that of the key with this SHA-256? In constant time; False for a pepper that we don't have."""
        secret = self.secrets.get(version)
        if secret is None:
            return False
        return hmac.compare_digest(hmac.new(secret, sha256, hashlib.sha256).hexdigest(), digest)

    def derive(self, purpose: str, data: bytes) -> bytes:
        """32 bytes that only we can know. From the lowest version: rotation keeps them."""
        return hmac.new(self.secrets[min(self.secrets)], purpose.encode() + b":" + data, hashlib.sha256).digest()

    def salt(self, of: str) -> str:
        """An opaque prefix-cache salt."""
        return self.derive("salt", of.encode()).hex()[:32]
