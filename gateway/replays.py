"""Replays: what became of requests with an Idempotency-Key, in Redis: claimed, renewed while the request runs, then
kept with its answer or dropped. Answers are encrypted under the pepper; fingerprints are keyed with it. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from tenants.key_format import Pepper
from tenants.slots import TenantSlot
from tenants.state import Argument, Client, Script

KEEP_S = 86400
LEASE_S = 30.0
"""After this time a request whose worker died may be tried again."""

_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_DROP = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
_KEEP = """
-- KEYS record, [epoch of its tenant]; ARGV what it is while it runs, what it is to be, seconds, [epoch]
if KEYS[2] and redis.call('GET', KEYS[2]) ~= ARGV[4] then return 'stale' end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'gone' end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 'kept'
"""


@dataclass(frozen=True)
class Kept:
    """An answer; `body` None = it was given, but is not kept."""

    status: int
    headers: dict[str, str]
    body: bytes | None


@dataclass(frozen=True)
class Found:
    """What is known of a record: its request's keyed fingerprint (None = not yet), and its answer (None = it runs)."""

    fingerprint: str | None
    kept: Kept | None


@dataclass
class Claim:
    """The right to do the request of this record, until keep() or drop(). `tenant` "" = an administrator's; `ttl_s` and
    `epoch`: how long texts of the tenant may be kept, as of when."""

    record: str
    pending: bytes
    tenant: str = ""
    ttl_s: int = KEEP_S
    epoch: int = 0


class Replays:
    """Every method raises RedisUnavailable when Redis is away."""

    def __init__(self, redis: Client, pepper: Pepper, keeping: Callable[[str], Awaitable[tuple[int, int]]]) -> None:
        """keeping: of a tenant, how many seconds its texts are kept by now, and the epoch as of which."""
        self._redis = redis
        self._pepper = pepper
        self._keeping = keeping
        self._renew, self._drop, self._keep = Script(_RENEW), Script(_DROP), Script(_KEEP)

    def record(self, tenant: str, *parts: str) -> str:
        """The name of a record. A tenant's lie in its slot, where they are erased with its other texts."""
        name = hashlib.sha256(orjson.dumps(parts)).hexdigest()
        return f"{{t:{tenant}}}:replay:{name}" if tenant else f"chorus:replay:{name}"

    def keyed(self, fingerprint: str) -> str:
        """Tells nobody who has only Redis what was asked."""
        return self._pepper.derive("fingerprint", fingerprint.encode()).hex()

    async def claim(self, claim: Claim, fingerprint: str | None) -> Found | None:
        """None: it is yours now. Else what there is."""
        claim.pending = orjson.dumps({"token": secrets.token_hex(16), "fingerprint": fingerprint})
        if await self._redis.set(claim.record, claim.pending, nx=True, px=int(LEASE_S * 1000)):
            return None
        row = orjson.loads(await self._redis.get(claim.record) or b"{}")
        if "status" not in row:
            return Found(row.get("fingerprint"), None)
        body = None if row["body"] is None else self._open(claim.record, bytes.fromhex(row["body"]))
        return Found(row["fingerprint"], Kept(row["status"], row["headers"], body))

    async def renew(self, claim: Claim) -> None:
        await self._renew(self._redis, [claim.record], [claim.pending, int(LEASE_S * 1000)])

    async def drop(self, claim: Claim) -> None:
        """The request may be tried again."""
        await self._drop(self._redis, [claim.record], [claim.pending])

    async def keep(self, claim: Claim, fingerprint: str, answer: Kept) -> None:
        """Not the body, if the tenant's texts are not retained; nothing, if the claim was lost."""
        while True:
            body = answer.body if claim.ttl_s else None
            sealed = None if body is None else self._seal(claim.record, body).hex()
            row: dict[str, Any] = {
                "fingerprint": fingerprint, "status": answer.status, "headers": answer.headers, "body": sealed,
            }  # fmt: skip
            keys = [claim.record, TenantSlot(claim.tenant).epoch] if claim.tenant else [claim.record]
            ttl_s = min(claim.ttl_s or KEEP_S, KEEP_S)
            args: list[Argument] = [claim.pending, orjson.dumps(row), ttl_s, claim.epoch]
            if await self._keep(self._redis, keys, args) != "stale":
                return
            claim.ttl_s, claim.epoch = await self._keeping(claim.tenant)

    def _seal(self, record: str, data: bytes) -> bytes:
        nonce = secrets.token_bytes(16)
        hidden = self._crypt(record, nonce, data)
        return nonce + self._tag(record, nonce, hidden) + hidden

    def _open(self, record: str, sealed: bytes) -> bytes | None:
        """None for what was sealed under a pepper that we don't have."""
        nonce, tag, hidden = sealed[:16], sealed[16:48], sealed[48:]
        if not hmac.compare_digest(tag, self._tag(record, nonce, hidden)):
            return None
        return self._crypt(record, nonce, hidden)

    def _crypt(self, record: str, nonce: bytes, data: bytes) -> bytes:
        """XOR with a stream that only this record has with this nonce, under a key that only we have."""
        key = self._pepper.derive("replay", record.encode() + nonce)
        stream = hashlib.shake_256(key).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _tag(self, record: str, nonce: bytes, hidden: bytes) -> bytes:
        return self._pepper.derive("replay tag", record.encode() + nonce + hidden)
