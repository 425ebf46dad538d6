"""SourceBook: what became of each adapter that was found in a watched source. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from sqlalchemy import delete, func, select

from adapters.rows import SourceRow
from tenants.db import Database, now


@dataclass(frozen=True)
class Key:
    """Where it lies: the first and the second directory below the source."""

    tenant: str
    name: str


@dataclass(frozen=True)
class Outcome:
    """What came of it the last time that it changed.

    mark      of the files that were looked at (see adapters.sources.Found), and of the rules they were held against
    digest    of what is registered because of this source; "" = nothing yet
    code      "" = it is ready; else why not, as an upload would be told
    """

    mark: str
    digest: str = ""
    code: str = ""
    message: str = ""
    param: str | None = None
    at: datetime | None = None


def source_id(place: str) -> str:
    """A short name of a source, for paths and keys."""
    return sha256(place.encode()).hexdigest()[:12]


class SourceBook:
    """The pages of all sources, each by its id."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, source: str) -> dict[Key, Outcome]:
        async with self._database.session() as session:
            rows = await session.scalars(select(SourceRow).where(SourceRow.source == source))
            return {Key(row.tenant, row.name): _outcome(row) for row in rows}

    async def write(self, source: str, key: Key, outcome: Outcome) -> None:
        async with self._database.begin() as session:
            row = await session.get(SourceRow, (source, key.tenant, key.name))
            if row is None:
                row = SourceRow(source=source, tenant=key.tenant, name=key.name)
                session.add(row)
            row.mark, row.digest, row.at = outcome.mark, outcome.digest, now()
            row.code, row.message, row.param = outcome.code, outcome.message, outcome.param

    async def forget(self, source: str, key: Key) -> None:
        mine = (SourceRow.source == source, SourceRow.tenant == key.tenant, SourceRow.name == key.name)
        async with self._database.begin() as session:
            await session.execute(delete(SourceRow).where(*mine))

    async def counts(self, source: str) -> dict[str, int]:
        """How many are "ready" and "failed"."""
        failed = func.count().filter(SourceRow.code != "")
        async with self._database.session() as session:
            query = select(func.count(), failed).where(SourceRow.source == source)
            total, num_failed = (await session.execute(query)).one()
        return {"ready": total - num_failed, "failed": num_failed}

    async def page(
        self, source: str, after: Key | None = None, limit: int = 100, is_failed: bool | None = None
    ) -> tuple[list[tuple[Key, Outcome]], bool]:
        """By tenant and name, and whether there are more."""
        query = select(SourceRow).where(SourceRow.source == source)
        if is_failed is not None:
            query = query.where(SourceRow.code != "" if is_failed else SourceRow.code == "")
        if after is not None:
            later = (SourceRow.tenant == after.tenant) & (SourceRow.name > after.name)
            query = query.where((SourceRow.tenant > after.tenant) | later)
        async with self._database.session() as session:
            rows = list(await session.scalars(query.order_by(SourceRow.tenant, SourceRow.name).limit(limit + 1)))
        return [(Key(row.tenant, row.name), _outcome(row)) for row in rows[:limit]], len(rows) > limit


def _outcome(row: SourceRow) -> Outcome:
    return Outcome(row.mark, row.digest, row.code, row.message, row.param, row.at)
