"""AdapterRegistry: which tenant's name means which digest. The last place where an adapter has a name.

A name has versions; each is a digest and never changes; `current` points at one of them. Adapters of the tenant "" are
shared by all; a tenant's own adapter of the same name wins. Deleting retires name and versions: nobody finds them any
more, their files go when no version refers to them and a grace has passed (collect), and numbers are never used again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from adapters.records import (
    SHARED,
    Adapter,
    AdapterNotFound,
    NameInvalid,
    NameTaken,
    RegistryError,
    Resolved,
    Stored,
    Version,
    VersionConflict,
    not_found,
)
from adapters.rows import AdapterRow, VersionRow
from tenants import audit
from tenants.audit import Act, Actor
from tenants.db import Database, now
from tenants.epochs import Epochs

if TYPE_CHECKING:
    from adapters.storage import DirectoryStore

__all__ = [
    "SHARED", "Adapter", "AdapterNotFound", "AdapterRegistry", "NameInvalid", "NameTaken", "RegistryError", "Resolved",
    "Stored", "Version", "VersionConflict",
]  # fmt: skip

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REFERENCE = re.compile(rf"({NAME.pattern})(?:@([1-9][0-9]{{0,8}}))?")


class AdapterRegistry:
    """All names. `reserved` are those of base models."""

    def __init__(self, database: Database, epochs: Epochs, reserved: Collection[str] = ()) -> None:
        self._database = database
        self._epochs = epochs
        self._reserved = frozenset(name.casefold() for name in reserved)

    def check_name(self, name: str) -> None:
        """Raises NameInvalid."""
        if not NAME.fullmatch(name):
            raise NameInvalid("name_invalid", f"an adapter's name must match {NAME.pattern}", "name")
        if name.casefold() in self._reserved:
            raise NameInvalid("name_reserved", f"{name} is the name of a base model", "name")

    async def register(self, tenant_id: str, name: str, stored: Stored, actor: Actor) -> Adapter:
        """A new name with its first version, which is current. Of concurrent calls exactly one wins.

        Raises NameInvalid, NameTaken.
        """
        self.check_name(name)
        try:
            async with self._change(tenant_id) as session:
                row = await _row(session, tenant_id, name)
                if row is None:
                    row = AdapterRow(tenant_id=tenant_id, name=name, current=0, last_version=0)
                    session.add(row)
                elif row.retired_at is None:
                    raise _taken(name)
                else:
                    row.retired_at, row.created_at = None, now()
                await session.flush()
                version = _add_version(session, row, stored)
                row.current = version.version
                await session.flush()
                audit.append(session, actor, Act("adapter.create", tenant_id, name, after=_described(version)))
                return await _adapter(session, row)
        except IntegrityError:
            raise _taken(name) from None

    async def replace(self, tenant_id: str, name: str, stored: Stored, actor: Actor, activate: bool = True) -> Adapter:
        """A new version of a name, the last of `.versions`; current at once if `activate`. Raises AdapterNotFound."""
        async with self._change(tenant_id) as session:
            row = await _live(session, tenant_id, name)
            before = {"current": row.current}
            version = _add_version(session, row, stored)
            row.current = version.version if activate else row.current
            await session.flush()
            after = _described(version) | {"current": row.current}
            audit.append(session, actor, Act("adapter.replace", tenant_id, name, before, after))
            return await _adapter(session, row)

    async def activate(
        self, tenant_id: str, name: str, version: int, actor: Actor, if_current: int | None = None
    ) -> Adapter:
        """Makes `version` current, but only if `if_current` (when given) still is.

        Raises AdapterNotFound, VersionConflict.
        """
        async with self._change(tenant_id) as session:
            row = await _live(session, tenant_id, name)
            adapter = await _adapter(session, row)
            adapter.version(version)
            if if_current not in (None, row.current):
                raise VersionConflict("conflict", f"version {row.current} is current, not {if_current}", "if_current")
            before, row.current = {"current": row.current}, version
            await session.flush()
            audit.append(session, actor, Act("adapter.activate", tenant_id, name, before, {"current": version}))
            return await _adapter(session, row)

    async def retire(self, tenant_id: str, name: str, actor: Actor) -> list[str]:
        """Nobody finds the name any more. → digests that no version refers to now: engines may evict them.

        Raises AdapterNotFound.
        """
        async with self._change(tenant_id) as session:
            row = await _live(session, tenant_id, name)
            return await _retire(session, row, actor)

    async def retire_all(self, tenant_id: str, actor: Actor) -> list[str]:
        """Every adapter of a tenant, as retire()."""
        async with self._change(tenant_id) as session:
            query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.retired_at.is_(None))
            rows = list(await session.scalars(query.with_for_update()))
            return sorted({digest for row in rows for digest in await _retire(session, row, actor)})

    async def get(self, tenant_id: str, name: str) -> Adapter:
        """One adapter of exactly this tenant. Raises AdapterNotFound."""
        async with self._database.session() as session:
            return await _adapter(session, await _live(session, tenant_id, name, lock=False))

    async def page(self, tenant_id: str, after: str | None = None, limit: int = 100) -> tuple[list[Adapter], bool]:
        """A page of this tenant's adapters in the order of names, and whether there are more."""
        query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.retired_at.is_(None))
        query = query.order_by(AdapterRow.name).limit(limit + 1)
        if after is not None:
            query = query.where(AdapterRow.name > after)
        async with self._database.session() as session:
            rows = list(await session.scalars(query))
            return [await _adapter(session, row) for row in rows[:limit]], len(rows) > limit

    async def visible(self, tenant_id: str) -> list[Resolved]:
        """Everything that this tenant may call, its own and the shared ones that it has no own for, by name."""
        async with self._database.session() as session:
            rows = await session.execute(_resolving(tenant_id).order_by(AdapterRow.tenant_id))
            found = {adapter.name: _resolved(adapter, version) for adapter, version in rows}  # the own one is last
        return [found[name] for name in sorted(found)]

    async def resolve(self, tenant_id: str, name: str) -> Resolved | None:
        """What `name` or `name@version` means to this tenant now; None if it means nothing."""
        reference = _REFERENCE.fullmatch(name)
        if reference is None:
            return None
        version = int(reference[2]) if reference[2] else None
        query = _resolving(tenant_id, version).where(AdapterRow.name == reference[1])
        async with self._database.session() as session:
            row = (await session.execute(query.order_by(AdapterRow.tenant_id.desc()).limit(1))).first()
        return None if row is None or row[1] is None else _resolved(row[0], row[1])

    async def collect(self, store: DirectoryStore, grace_s: float) -> list[str]:
        """Deletes stored files that no version refers to and nobody committed or retired within `grace_s`, which must
        be longer than any request or upload may take. → their digests.
        """
        stored = await asyncio.to_thread(store.digests)
        gone = []
        for digest in await self._orphans(stored, grace_s):
            if await asyncio.to_thread(store.delete, digest, grace_s):
                gone.append(digest)
        oldest = now() - timedelta(seconds=grace_s)
        async with self._database.begin() as session:
            await session.execute(delete(VersionRow).where(VersionRow.retired_at < oldest))
        await asyncio.to_thread(store.sweep)
        return gone

    async def _orphans(self, stored: Iterable[str], grace_s: float) -> list[str]:
        oldest = now() - timedelta(seconds=grace_s)
        kept = select(VersionRow.digest).where((VersionRow.retired_at.is_(None)) | (VersionRow.retired_at >= oldest))
        async with self._database.session() as session:
            in_use = set(await session.scalars(kept.distinct()))
        return [digest for digest in stored if digest not in in_use]

    @asynccontextmanager
    async def _change(self, tenant_id: str) -> AsyncIterator[AsyncSession]:
        changing = self._epochs.change_all() if tenant_id == SHARED else self._epochs.change(tenant_id)
        async with changing as session:
            yield session


def _taken(name: str) -> NameTaken:
    return NameTaken("adapter_exists", f"there is an adapter named {name}", "name")


async def _row(session: AsyncSession, tenant_id: str, name: str, lock: bool = True) -> AdapterRow | None:
    query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
    found: AdapterRow | None = await session.scalar(query.with_for_update() if lock else query)
    return found


async def _live(session: AsyncSession, tenant_id: str, name: str, lock: bool = True) -> AdapterRow:
    row = await _row(session, tenant_id, name, lock) if NAME.fullmatch(name) else None
    if row is None or row.retired_at is not None:
        raise not_found(name)
    return row


def _add_version(session: AsyncSession, row: AdapterRow, stored: Stored) -> VersionRow:
    row.last_version += 1
    row.updated_at = now()
    spec = stored.spec
    version = VersionRow(
        adapter_id=row.id, version=row.last_version, digest=stored.digest, rank=spec.rank,
        target_modules=list(spec.target_modules), num_modules=len(spec.modules), num_tensors=spec.num_tensors,
        size_bytes=stored.size_bytes, packed_bytes=spec.packed_bytes, base_model=spec.base_model,
        warnings=list(spec.warnings),
    )  # fmt: skip
    session.add(version)
    return version


async def _retire(session: AsyncSession, row: AdapterRow, actor: Actor) -> list[str]:
    mine = (VersionRow.adapter_id == row.id, VersionRow.retired_at.is_(None))
    digests = set(await session.scalars(select(VersionRow.digest).where(*mine)))
    row.retired_at = now()
    await session.flush()
    await session.execute(update(VersionRow).where(*mine).values(retired_at=row.retired_at))
    audit.append(session, actor, Act("adapter.delete", row.tenant_id, row.name, {"current": row.current}))
    used = select(VersionRow.digest).where(VersionRow.digest.in_(digests), VersionRow.retired_at.is_(None))
    return sorted(digests - set(await session.scalars(used)))


async def _adapter(session: AsyncSession, row: AdapterRow) -> Adapter:
    query = select(VersionRow).where(VersionRow.adapter_id == row.id, VersionRow.retired_at.is_(None))
    versions = await session.scalars(query.order_by(VersionRow.version))
    return Adapter(row.tenant_id, row.name, row.current, tuple(map(_version, versions)), row.created_at, row.updated_at)


def _version(row: VersionRow) -> Version:
    return Version(
        row.version, row.digest, row.rank, tuple(row.target_modules), row.num_modules, row.num_tensors,
        row.size_bytes, row.packed_bytes, row.base_model, tuple(row.warnings), row.created_at,
    )  # fmt: skip


def _described(row: VersionRow) -> dict[str, Any]:
    return {"version": row.version, "digest": row.digest, "rank": row.rank, "size_bytes": row.size_bytes}


def _resolving(tenant_id: str, version: int | None = None) -> Any:
    """Live adapters that the tenant sees, each with the wanted version (or the current one; None if it lacks it)."""
    wanted = VersionRow.version == (AdapterRow.current if version is None else version)
    return (
        select(AdapterRow, VersionRow)
        .outerjoin(VersionRow, (VersionRow.adapter_id == AdapterRow.id) & wanted & VersionRow.retired_at.is_(None))
        .where(AdapterRow.tenant_id.in_([tenant_id, SHARED]), AdapterRow.retired_at.is_(None))
    )


def _resolved(adapter: AdapterRow, version: VersionRow) -> Resolved:
    return Resolved(adapter.tenant_id, adapter.name, version.version, _version(version).ref, version.created_at)
