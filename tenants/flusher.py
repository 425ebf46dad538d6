"""From the streams in Redis to the ledger in SQL. An entry is deleted from its stream only after it was committed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

import msgspec

from tenants.slots import ACTIVE, TenantSlot
from tenants.state import Client
from tenants.usage import UsageLedger, UsageRecord

log = logging.getLogger(__name__)
_TENANTS, _ENTRIES = 100, 200
READER_S = 60
"""Budgets are counted in less."""


class UsageFlusher:
    """Any number may run at once, and may die at any point: writing an entry again is harmless."""

    def __init__(self, redis: Client, ledger: UsageLedger) -> None:
        self._redis = redis
        self._ledger = ledger

    async def flush(self) -> int:
        """Write all that waits. → how many entries. Raises RedisUnavailable, DatabaseUnavailable."""
        tenants: list[str] = await self._redis.zrange(ACTIVE, 0, -1)
        flushed = 0
        for start in range(0, len(tenants), _TENANTS):
            slots = [TenantSlot(tenant_id) for tenant_id in tenants[start : start + _TENANTS]]
            while slots:
                slots, written = await self._flush(slots)
                flushed += written
        return flushed

    async def _flush(self, slots: Sequence[TenantSlot]) -> tuple[list[TenantSlot], int]:
        """One round. → those with more, how many entries."""
        slots = await self._readable(slots)
        pipe = self._redis.pipeline(transaction=False)
        for slot in slots:
            pipe.set(slot.reader, secrets.token_hex(8), ex=READER_S)
            pipe.xrange(slot.usage, count=_ENTRIES)
        answers = await pipe.execute()
        found = [(slot, rows) for slot, rows in zip(slots, answers[1::2], strict=True) if rows]
        if not found:
            return [], 0
        pipe = self._redis.pipeline(transaction=False)
        records: dict[tuple[str, bool], UsageRecord] = {}
        for slot, rows in found:
            for _, fields in rows:
                try:
                    record = msgspec.json.decode(fields["entry"], type=UsageRecord)
                    records[record.attempt_id, record.status == "expired"] = record
                except (msgspec.MsgspecError, KeyError) as error:
                    log.error("a usage entry of tenant %s can't be read: %s", slot.tenant_id, error)
                    pipe.rpush(slot.damaged_usage, msgspec.json.encode(fields))
            pipe.xdel(slot.usage, *(row_id for row_id, _ in rows))
        await self._ledger.add(records.values())
        await pipe.execute()
        return [slot for slot, rows in found if len(rows) == _ENTRIES], sum(len(rows) for _, rows in found)

    async def _readable(self, slots: Sequence[TenantSlot]) -> list[TenantSlot]:
        """Without those whose budgets somebody counts: to read their streams would make that begin again."""
        pipe = self._redis.pipeline(transaction=False)
        for slot in slots:
            pipe.exists(slot.counting)
        return [slot for slot, is_counted in zip(slots, await pipe.execute(), strict=True) if not is_counted]
