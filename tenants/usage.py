"""The usage ledger: one row per attempt, exactly once; corrections; sums, kept per day. Knows no limits.

An attempt is one try of one request at one engine. Its entry travels from the worker through a Redis stream to
usage_entries (tenants.flusher). Writing it twice is harmless, and the entry of an attempt that its worker settled
replaces the one that an expired lease left, whichever comes first.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal

import msgspec
from sqlalchemy import bindparam, case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import audit
from tenants.audit import Act, Actor
from tenants.db import Database, now
from tenants.models import ApiKey, UsageDay, UsageEntry

_LENGTHS = {"model": 256, "request_id": 512, "endpoint": 64, "user": 512}
Status = Literal["ok", "error", "cancelled", "refused", "timeout", "expired", "correction"]
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
class Tokens:
    """What a correction adds: negative numbers take away."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True)
class UsageSum:
    """Totals of one group; `group` has a value per name in group_by."""

    group: dict[str, str]
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


_COLUMNS = {
    "day": "day", "tenant": "tenant_id", "key": "key_id", "model": "model", "adapter": "adapter", "status": "status",
    "user": "user",
}  # fmt: skip
_SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens")
_BATCH = 500
CORRECTION = "correction"


class DayChanges:
    """What a transaction adds to the sums per day."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def add(self, row: Mapping[str, Any], sign: int = 1) -> None:
        sums = self._sums[tuple(row[column.name] for column in _DAY_KEY)]
        sums[0] += sign * (row["status"] != CORRECTION)
        for index, name in enumerate(_SUMMED, start=1):
            sums[index] += sign * row[name]

    async def write(self, session: AsyncSession, insert: Any) -> None:
        """In the order of the primary key, so that concurrent writers can't deadlock."""
        names = [column.name for column in _DAY_KEY]
        rows = [
            {**dict(zip(names, group, strict=True)), "attempts": sums[0], **dict(zip(_SUMMED, sums[1:], strict=True))}
            for group, sums in sorted(self._sums.items())
            if any(sums)
        ]
        for start in range(0, len(rows), _BATCH):
            statement = insert(UsageDay).values(rows[start : start + _BATCH])
            added = {name: getattr(UsageDay, name) + statement.excluded[name] for name in ("attempts", *_SUMMED)}
            await session.execute(statement.on_conflict_do_update(index_elements=names, set_=added))


_DAY_KEY = tuple(UsageDay.__table__.primary_key)


class UsageLedger:
    """usage_entries: append, read, sum."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, records: Iterable[UsageRecord]) -> None:
        """Write entries, in one transaction, in the order of their ids (concurrent writers can't deadlock)."""
        rows = [_row(record) for record in sorted(records, key=lambda record: record.attempt_id)]
        if not rows:
            return
        async with self._database.begin() as session:
            changes = DayChanges()
            for start in range(0, len(rows), _BATCH):
                await self._add(session, rows[start : start + _BATCH], changes)
            await _note_use(session, rows)
            await changes.write(session, self._insert)

    @property
    def _insert(self) -> Any:
        """Two functions with the same methods, one per dialect."""
        return sqlite.insert if self._database.is_sqlite else postgresql.insert

    async def _add(self, session: AsyncSession, rows: list[dict[str, Any]], changes: DayChanges) -> None:
        """An entry that is there already stays, unless it is what an expired lease left and this is the real one."""
        last = {row["attempt_id"]: row for row in rows if row["status"] == "expired"}
        last |= {row["attempt_id"]: row for row in rows if row["status"] != "expired"}
        statement = self._insert(UsageEntry).values(list(last.values()))
        statement = statement.on_conflict_do_nothing(index_elements=["attempt_id"]).returning(UsageEntry.attempt_id)
        new = set(await session.scalars(statement))
        for attempt_id in new:
            changes.add(last[attempt_id])
        better = [name for name, row in last.items() if name not in new and row["status"] != "expired"]
        if not better:
            return
        wanted = select(UsageEntry).where(UsageEntry.attempt_id.in_(better), UsageEntry.status == "expired")
        for entry in await session.scalars(wanted.order_by(UsageEntry.attempt_id).with_for_update()):
            row = last[entry.attempt_id]
            changes.add({name: getattr(entry, name) for name in row}, sign=-1)
            changes.add(row)
            for name, value in row.items():
                setattr(entry, name, value)
        await session.flush()

    async def get(self, attempt_id: str) -> UsageEntry | None:
        async with self._database.session() as session:
            return await session.get(UsageEntry, attempt_id)

    async def correct(self, attempt_id: str, tokens: Tokens, reason: str, actor: Actor) -> UsageEntry | None:
        """An entry beside that of the attempt, on its day: what is there never changes. None if there is none."""
        async with self._database.begin() as session:
            found = await session.get(UsageEntry, attempt_id)
            if found is None or found.status == CORRECTION:
                return None
            record = UsageRecord(
                attempt_id=f"correction-{secrets.token_hex(16)}", tenant_id=found.tenant_id, key_id=found.key_id,
                model=found.model, adapter=found.adapter, adapter_version=found.adapter_version, user=found.user,
                request_id=found.request_id, status="correction", prompt_tokens=tokens.prompt,
                cached_tokens=tokens.cached, completion_tokens=tokens.completion, created_at=found.created_at,
                tags={"corrects": attempt_id, "reason": reason},
            )  # fmt: skip
            changes = DayChanges()
            await self._add(session, [_row(record.cleaned())], changes)
            await changes.write(session, self._insert)
            act = Act("usage.correct", found.tenant_id, attempt_id, after={**asdict(tokens), "reason": reason})
            audit.append(session, actor, act)
        return await self.get(record.attempt_id)

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
        """Totals per group, in the order of the groups; without groups exactly one. From the sums per day, if the query
        asks for whole days (UTC) and not by user; else from every entry."""
        is_daily = "user" not in group_by and _is_whole_days(query)
        table: Any = UsageDay if is_daily else UsageEntry
        columns = [getattr(table, _COLUMNS[name]) for name in group_by]
        attempts = UsageDay.attempts if is_daily else case((UsageEntry.status == CORRECTION, 0), else_=1)
        numbers = (attempts, table.prompt_tokens, table.cached_tokens, table.completion_tokens)
        totals = [func.coalesce(func.sum(number), 0) for number in numbers]
        wanted = _where(select(*columns, *totals).group_by(*columns).order_by(*columns), query, table)
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


def _is_whole_days(query: UsageQuery) -> bool:
    midnight = time(tzinfo=UTC)
    return all(moment is None or moment.astimezone(UTC).timetz() == midnight for moment in (query.start, query.end))


def _where(wanted: Any, query: UsageQuery, table: Any = UsageEntry) -> Any:
    at = UsageDay.day if table is UsageDay else UsageEntry.created_at
    start, end = [
        moment.astimezone(UTC).date() if moment is not None and table is UsageDay else moment
        for moment in (query.start, query.end)
    ]
    if query.tenant_id is not None:
        wanted = wanted.where(table.tenant_id == query.tenant_id)
    if query.key_id is not None:
        wanted = wanted.where(table.key_id == query.key_id)
    if start is not None:
        wanted = wanted.where(at >= start)
    if end is not None:
        wanted = wanted.where(at < end)
    return wanted


def _text(value: object) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)
