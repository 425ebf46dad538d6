"""The usage ledger: one row per attempt, exactly once; and its sums. Knows no limits.

An attempt is one try of one request at one engine. Its entry travels from the worker through a Redis stream to
usage_entries (tenants.flusher). Writing it twice is harmless, and the entry of an attempt that its worker settled
replaces the one that an expired lease left, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

import msgspec
from sqlalchemy import bindparam, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.db import Database, now
from tenants.models import ApiKey, UsageEntry

_LENGTHS = {"model": 256, "request_id": 512, "endpoint": 64, "user": 512}
Status = Literal["ok", "error", "cancelled", "refused", "timeout", "expired"]
Group = Literal["day", "tenant", "key", "model", "adapter", "status", "user"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one attempt used.

    hold() gets it with the prompt counted and status "expired", which is what it becomes if nobody settles it;
    settle() gets it complete (msgspec.structs.replace). `adapter` is the digest, "" for the base model; `user` and
    `tags` are the client's own. Times are seconds since the request arrived.
    """

    attempt_id: str
    tenant_id: str
    key_id: str
    model: str
    request_id: str = ""
    adapter: str = ""
    adapter_version: int | None = None
    endpoint: str = ""
    status: Status = "expired"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    user: str = ""
    tags: dict[str, str] | None = None
    created_at: datetime = msgspec.field(default_factory=now)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def cleaned(self) -> UsageRecord:
        """With texts that any database takes: no NUL, no lone surrogate, not too long."""
        changed: dict[str, Any] = {}
        for name, length in _LENGTHS.items():
            value = getattr(self, name)
            if not value.isascii() or not value.isprintable() or len(value) > length:
                changed[name] = _clean(value)[:length]
        if self.tags:
            changed["tags"] = {_clean(key): _clean(value) for key, value in self.tags.items()}
        return msgspec.structs.replace(self, **changed) if changed else self


@dataclass(frozen=True)
class UsageQuery:
    """Which entries: of one tenant (None = all), one key, from `start` until before `end`."""

    tenant_id: str | None = None
    key_id: str | None = None
    start: datetime | None = None
    end: datetime | None = None


@dataclass(frozen=True)
class UsageSum:
    """Totals of one group; `group` has a value per name in group_by."""

    group: dict[str, str]
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


_COLUMNS = {
    "day": UsageEntry.day, "tenant": UsageEntry.tenant_id, "key": UsageEntry.key_id, "model": UsageEntry.model,
    "adapter": UsageEntry.adapter, "status": UsageEntry.status, "user": UsageEntry.user,
}  # fmt: skip


class UsageLedger:
    """usage_entries: append, read, sum."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, records: Iterable[UsageRecord]) -> None:
        """Write entries, in one transaction, in the order of their ids (concurrent writers can't deadlock)."""
        rows = [_row(record) for record in sorted(records, key=lambda record: record.attempt_id)]
        if not rows:
            return
        # Two classes with the same methods, one per dialect.
        insert: Any = sqlite.insert(UsageEntry) if self._database.is_sqlite else postgresql.insert(UsageEntry)
        replaced = {name: insert.excluded[name] for name in rows[0] if name != "attempt_id"}
        statement = insert.on_conflict_do_update(
            index_elements=["attempt_id"], set_=replaced,
            where=(UsageEntry.status == "expired") & (insert.excluded.status != "expired"),
        )  # fmt: skip
        async with self._database.begin() as session:
            await session.execute(statement, rows)
            await _note_use(session, rows)

    async def get(self, attempt_id: str) -> UsageEntry | None:
        async with self._database.session() as session:
            return await session.get(UsageEntry, attempt_id)

    async def page(
        self, query: UsageQuery, before: tuple[datetime, str] | None = None, limit: int = 100
    ) -> tuple[list[UsageEntry], bool]:
        """Entries, newest first, beyond the (created_at, attempt_id) of the last one seen; whether there are more."""
        wanted = _where(select(UsageEntry), query)
        if before is not None:
            at, attempt_id = before
            is_earlier = (UsageEntry.created_at == at) & (UsageEntry.attempt_id < attempt_id)
            wanted = wanted.where((UsageEntry.created_at < at) | is_earlier)
        wanted = wanted.order_by(UsageEntry.created_at.desc(), UsageEntry.attempt_id.desc()).limit(limit + 1)
        async with self._database.session() as session:
            rows = list(await session.scalars(wanted))
        return rows[:limit], len(rows) > limit

    async def sums(self, query: UsageQuery, group_by: Sequence[Group] = ()) -> list[UsageSum]:
        """Totals per group, in the order of the groups; without groups exactly one."""
        columns = [_COLUMNS[name] for name in group_by]
        totals = [
            func.count(), *(func.coalesce(func.sum(column), 0) for column in
            (UsageEntry.prompt_tokens, UsageEntry.cached_tokens, UsageEntry.completion_tokens)),
        ]  # fmt: skip
        wanted = _where(select(*columns, *totals).group_by(*columns).order_by(*columns), query)
        async with self._database.session() as session:
            rows = list(await session.execute(wanted))
        size = len(group_by)
        return [
            UsageSum(dict(zip(group_by, map(_text, row[:size]), strict=True)), *(int(value) for value in row[size:]))
            for row in rows
        ]


async def _note_use(session: AsyncSession, rows: list[dict[str, Any]]) -> None:
    """When each key was used last, to the minute."""
    last: dict[str, datetime] = {}
    for row in rows:
        last[row["key_id"]] = max(row["created_at"], last.get(row["key_id"], row["created_at"]))
    is_later = ApiKey.last_used_at.is_(None) | (ApiKey.last_used_at < bindparam("before"))
    values = [{"key": key, "at": last[key], "before": last[key] - timedelta(minutes=1)} for key in sorted(last)]
    statement = update(ApiKey.__table__).where(ApiKey.id == bindparam("key"), is_later)  # type: ignore[arg-type]
    connection = await session.connection()
    await connection.execute(statement.values(last_used_at=bindparam("at")), values)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def _row(record: UsageRecord) -> dict[str, Any]:
    values = msgspec.structs.asdict(record)
    return {**values, "day": record.created_at.astimezone(UTC).date()}


def _where(wanted: Any, query: UsageQuery) -> Any:
    if query.tenant_id is not None:
        wanted = wanted.where(UsageEntry.tenant_id == query.tenant_id)
    if query.key_id is not None:
        wanted = wanted.where(UsageEntry.key_id == query.key_id)
    if query.start is not None:
        wanted = wanted.where(UsageEntry.created_at >= query.start)
    if query.end is not None:
        wanted = wanted.where(UsageEntry.created_at < query.end)
    return wanted


def _text(value: object) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)
