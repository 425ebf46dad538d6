"""The usage ledger: one row per attempt, exactly once; corrections; sums, kept per day. Knows no limits.

An attempt is one try of one request at one engine. Its entry travels from the worker through a Redis stream to
usage_entries (tenants.flusher). Writing it twice is harmless, and the entry of an attempt that its worker settled
replaces the one that an expired lease left, whichever comes first.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal

import msgspec
from sqlalchemy import Select, String, bindparam, case, cast, func, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import audit
from tenants.audit import Act, Actor
from tenants.db import Database, now
from tenants.models import ApiKey, EpochOutbox, UsageDay, UsageEntry
from tenants.usage_days import CORRECTION, DayChanges

_LENGTHS = {"model": 256, "request_id": 512, "endpoint": 64, "user": 512}
Status = Literal["ok", "error", "cancelled", "refused", "timeout", "expired", "correction"]
Group = Literal["day", "tenant", "key", "model", "adapter", "version", "status", "user"]


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


class UsageSum(msgspec.Struct, frozen=True):
    """Totals of one group; `group` has a value per name in group_by."""

    group: dict[str, str]
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


_COLUMNS = {
    "day": "day", "tenant": "tenant_id", "key": "key_id", "model": "model", "adapter": "adapter", "status": "status",
    "user": "user", "version": "adapter_version",
}  # fmt: skip
_UNSUMMED = {"user", "version"}
"""Groups that the sums per day don't know."""
_BATCH = 500


_NAMES = [column.name for column in UsageEntry.__table__.columns]
_COLUMN_LIST = ", ".join(f'"{name}"' for name in _NAMES)
_INSERT_JSON = text(f"""
    INSERT INTO usage_entries ({_COLUMN_LIST})
    SELECT {_COLUMN_LIST} FROM json_populate_recordset(NULL::usage_entries, CAST(:entries AS json))
    ON CONFLICT (attempt_id) DO NOTHING RETURNING attempt_id
""")
_KNOWN_IDS = "SELECT attempt_id FROM usage_entries WHERE attempt_id IN (SELECT value FROM json_each(?))"
_INSERT_VALUES = f"INSERT INTO usage_entries ({_COLUMN_LIST}) VALUES ({', '.join('?' * len(_NAMES))})"


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
        new = await self._write_new(session, [last[attempt_id] for attempt_id in sorted(last)])
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

    async def _write_new(self, session: AsyncSession, rows: list[dict[str, Any]]) -> set[str]:
        """Those that are not there yet; → their ids. Each by a statement that is always the same, with nothing compiled
        nor converted column by column."""
        connection = await session.connection()
        if not self._database.is_sqlite:
            written = await connection.execute(_INSERT_JSON, {"entries": msgspec.json.encode(rows).decode()})
            return set(written.scalars())
        ids = msgspec.json.encode([row["attempt_id"] for row in rows]).decode()
        known = set((await connection.exec_driver_sql(_KNOWN_IDS, (ids,))).scalars())  # nobody else writes meanwhile
        new = [row for row in rows if row["attempt_id"] not in known]
        if new:
            await connection.exec_driver_sql(_INSERT_VALUES, [_sqlite_values(row) for row in new])
        return {row["attempt_id"] for row in new}

    async def month(
        self, tenant_id: str, day: date, attempts: Iterable[str]
    ) -> tuple[list[tuple[str, str, int, int]], dict[str, tuple[str, int]]]:
        """Tokens per key and model of this day, and of its month until now; and of `attempts` those that are there,
        with their status and tokens: all as of one moment."""
        tokens = UsageDay.prompt_tokens + UsageDay.completion_tokens
        of_day = func.sum(case((UsageDay.day == day, tokens), else_=0))
        wanted = select(UsageDay.key_id, UsageDay.model, of_day, func.sum(tokens)).group_by(
            UsageDay.key_id, UsageDay.model
        )
        is_month = (UsageDay.day >= day.replace(day=1)) & (UsageDay.day <= day)
        names: list[str] = list(attempts)
        known: dict[str, tuple[str, int]] = {}
        async with self._database.session() as session:
            if not self._database.is_sqlite:  # which reads a snapshot anyway
                await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            sums = await session.execute(wanted.where(UsageDay.tenant_id == tenant_id, is_month))
            rows = [(str(key), str(model), int(a), int(b)) for key, model, a, b in sums]
            for start in range(0, len(names), _BATCH):
                some = UsageEntry.attempt_id.in_(names[start : start + _BATCH])
                found = select(UsageEntry.attempt_id, UsageEntry.status,
                               UsageEntry.prompt_tokens + UsageEntry.completion_tokens).where(some)  # fmt: skip
                known |= {name: (status, int(used)) for name, status, used in await session.execute(found)}
        return rows, known

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
            session.add(EpochOutbox(tenant_id=found.tenant_id))  # its budgets are counted anew
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
        asks for whole days (UTC) and neither by user nor by version; else from every entry."""
        is_daily = not _UNSUMMED & set(group_by) and _is_whole_days(query)
        table: Any = UsageDay if is_daily else UsageEntry
        columns = [getattr(table, _COLUMNS[name]) for name in group_by]
        attempts = UsageDay.attempts if is_daily else case((UsageEntry.status == CORRECTION, 0), else_=1)
        numbers = (attempts, table.prompt_tokens, table.cached_tokens, table.completion_tokens)
        totals = [func.coalesce(func.sum(number), 0) for number in numbers]
        wanted = _where(select(*columns, *totals).group_by(*columns), query, table)
        rows = await self._read_json(wanted)
        size = len(group_by)
        rows.sort(key=lambda row: [(value is not None, value) for value in row[:size]])
        return [UsageSum(dict(zip(group_by, map(_text, row), strict=False)), *row[size:]) for row in rows]

    async def _read_json(self, wanted: Select[Any]) -> list[list[Any]]:
        """The rows, written as one text by the database: for tens of thousands a fraction of what a driver needs."""
        part = wanted.subquery()
        is_sqlite = self._database.is_sqlite
        row = (func.json_array if is_sqlite else func.json_build_array)(*part.c)
        whole = (func.json_group_array if is_sqlite else func.json_agg)(row)
        async with self._database.session() as session:
            found = await session.scalar(select(cast(whole, String)))
        return msgspec.json.decode(found or b"[]", type=list[list[Any]])

    async def last_days(self, digests: Collection[str], tenant_id: str | None = None) -> dict[str, date]:
        """Digest of an adapter → the last day (UTC) on which it answered, for one tenant or for anybody; those that
        never did are left out."""
        last = func.max(UsageDay.day)
        query = select(UsageDay.adapter, last).where(UsageDay.adapter.in_(sorted(digests))).group_by(UsageDay.adapter)
        if tenant_id is not None:
            query = query.where(UsageDay.tenant_id == tenant_id)
        async with self._database.session() as session:
            return {adapter: day for adapter, day in await session.execute(query)}


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


def _sqlite_values(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """As SQLAlchemy would write them."""
    moment = row["created_at"].astimezone(UTC).isoformat(" ", "microseconds")[:26]
    tags = None if row["tags"] is None else msgspec.json.encode(row["tags"]).decode()
    written = {**row, "created_at": moment, "day": row["day"].isoformat(), "tags": tags}
    return tuple(map(written.__getitem__, _NAMES))


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
    return value.isoformat() if isinstance(value, date) else "" if value is None else str(value)
