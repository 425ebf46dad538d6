"""AdapterRegistry: which tenant's name means which digest. The last place where an adapter has a name.

A name has versions; each is a digest and never changes; `current` points at one of them, aliases at others, and a
canary may answer a part of what is asked of the name. Adapters of the tenant "" are shared by all; a tenant's own
adapter of the same name wins. Deleting retires name and versions: nobody finds them any more, their files go when no
version refers to them and a grace has passed (collect), and numbers are never used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from adapters import queries
from adapters.moves import move, note_current, roll_back
from adapters.queries import ALIAS, NAME
from adapters.quota import AdapterUse, check_room, read_use
from adapters.records import (
    SHARED,
    Adapter,
    AdapterNotFound,
    Move,
    NameInvalid,
    NameTaken,
    Probes,
    Resolved,
    Stored,
    VersionConflict,
    VersionInUse,
)
from adapters.rows import ActivationRow, AdapterRow, AliasRow, VersionRow
from tenants import audit
from tenants.adapter_limits import AdapterLimits
from tenants.audit import Act, Actor
from tenants.db import Database, now
from tenants.epochs import Epochs

if TYPE_CHECKING:
    from adapters.storage import AdapterStore

RESERVED_ALIASES = frozenset(("latest", "current", "previous", "canary"))
"""Words that would promise to move by themselves."""


class AdapterRegistry:
    """All names. `reserved` are those of base models; `base` is the fingerprint of the one that is served, and what new
    versions are bound to; `limits` are those of tenants that have no others."""

    def __init__(
        self,
        database: Database,
        epochs: Epochs,
        reserved: Collection[str] = (),
        base: str = "",
        limits: AdapterLimits = AdapterLimits(),
    ) -> None:
        self.base = base
        self._database = database
        self._epochs = epochs
        self._limits = limits
        self._reserved = frozenset(name.casefold() for name in reserved)

    def check_name(self, name: str) -> None:
        """Raises NameInvalid."""
        if not NAME.fullmatch(name):
            raise NameInvalid("name_invalid", f"an adapter's name must match {NAME.pattern}", "name")
        if name.casefold() in self._reserved:
            raise NameInvalid("name_reserved", f"{name} is the name of a base model", "name")

    async def register(self, tenant_id: str, name: str, stored: Stored, actor: Actor) -> Adapter:
        """A new name with its first version, which is current. Of concurrent calls exactly one wins.

        Raises NameInvalid, NameTaken, AdapterQuotaExceeded, TenantNotFound.
        """
        self.check_name(name)
        try:
            async with self._change(tenant_id) as session:
                await self._check_room(session, tenant_id, stored, count=1)
                row = await queries.find(session, tenant_id, name, lock=True)
                if row is None:
                    row = AdapterRow(tenant_id=tenant_id, name=name, current=0, last_version=0)
                    session.add(row)
                elif row.retired_at is None:
                    raise _taken(name)
                else:
                    row.retired_at, row.created_at = None, now()
                await session.flush()
                version = self._add_version(session, row, stored)
                row.probes = stored.probes or []
                await note_current(session, row, version.version)
                after = _described(version) | _forced(stored.is_forced)
                audit.append(session, actor, Act("adapter.create", tenant_id, name, after=after))
                return await queries.adapter_of(session, row)
        except IntegrityError:
            raise _taken(name) from None

    async def replace(self, tenant_id: str, name: str, stored: Stored, actor: Actor, activate: bool = True) -> Adapter:
        """A new version of a name, the last of `.versions`; current at once if `activate`, which ends a canary.

        Raises AdapterNotFound, AdapterQuotaExceeded, TenantNotFound.
        """
        async with self._change(tenant_id) as session:
            await self._check_room(session, tenant_id, stored, count=0)
            row = await queries.live(session, tenant_id, name, lock=True)
            before = _state(row)
            version = self._add_version(session, row, stored)
            row.probes = row.probes if stored.probes is None else stored.probes
            if activate:
                await note_current(session, row, version.version)
            await session.flush()
            after = _described(version) | _state(row) | _forced(stored.is_forced)
            audit.append(session, actor, Act("adapter.replace", tenant_id, name, before, after))
            return await queries.adapter_of(session, row)

    async def activate(self, tenant_id: str, name: str, wanted: Move, actor: Actor) -> Adapter:
        """Raises AdapterNotFound, VersionConflict, BaseMismatch."""
        async with self._change(tenant_id) as session:
            row = await queries.live(session, tenant_id, name, lock=True)
            before = _state(row)
            await move(session, row, await queries.adapter_of(session, row), wanted, self.base)
            after = _state(row) | _forced(wanted.is_forced)
            audit.append(session, actor, Act("adapter.activate", tenant_id, name, before, after))
            return await queries.adapter_of(session, row)

    async def roll_back(self, tenant_id: str, name: str, actor: Actor, if_current: int | None = None) -> Adapter:
        """Ends a canary; where there is none, the version that was current before is so again. Repeated, it goes
        further back.

        Raises AdapterNotFound, NoEarlierVersion, VersionConflict, BaseMismatch.
        """
        async with self._change(tenant_id) as session:
            row = await queries.live(session, tenant_id, name, lock=True)
            before = _state(row)
            await roll_back(session, row, await queries.adapter_of(session, row), if_current, self.base)
            audit.append(session, actor, Act("adapter.rollback", tenant_id, name, before, _state(row)))
            return await queries.adapter_of(session, row)

    async def set_alias(
        self, tenant_id: str, name: str, alias: str, version: int, actor: Actor, if_current: int | None = None
    ) -> tuple[Adapter, bool]:
        """`name:alias` means this version; only if it meant `if_current` (when given; 0 = it was none). → the adapter,
        and whether the alias is new.

        Raises AdapterNotFound, NameInvalid, VersionConflict, BaseMismatch.
        """
        _check_alias(alias)
        async with self._change(tenant_id) as session:
            row = await queries.live(session, tenant_id, name, lock=True)
            (await queries.adapter_of(session, row)).version(version).check_base(name, self.base)
            found = await session.get(AliasRow, (row.id, alias))
            before = 0 if found is None else found.version
            if if_current not in (None, before):
                raise VersionConflict("conflict", f"{name}:{alias} is {before or 'not there'}", "if_current")
            await session.merge(AliasRow(adapter_id=row.id, alias=alias, version=version, updated_at=now()))
            await session.flush()
            was = None if found is None else {"version": before}
            act = Act("adapter.alias", tenant_id, f"{name}:{alias}", was, {"version": version})
            audit.append(session, actor, act)
            return await queries.adapter_of(session, row), found is None

    async def set_probes(self, tenant_id: str, name: str, probes: Probes, actor: Actor) -> None:
        """What a version must answer from now on before it becomes current. Raises AdapterNotFound."""
        async with self._change(tenant_id) as session:
            row = await queries.live(session, tenant_id, name, lock=True)
            act = Act("adapter.probes", tenant_id, name, {"probes": len(row.probes)}, {"probes": len(probes)})
            row.probes = probes
            audit.append(session, actor, act)

    async def delete_alias(self, tenant_id: str, name: str, alias: str, actor: Actor) -> Adapter:
        """Raises AdapterNotFound."""
        async with self._change(tenant_id) as session:
            row = await queries.live(session, tenant_id, name, lock=True)
            found = await session.get(AliasRow, (row.id, alias)) if ALIAS.fullmatch(alias) else None
            if found is None:
                raise AdapterNotFound("alias_not_found", "there is no such alias", "alias")
            await session.delete(found)
            await session.flush()
            act = Act("adapter.unalias", tenant_id, f"{name}:{alias}", {"version": found.version})
            audit.append(session, actor, act)
            return await queries.adapter_of(session, row)

    async def retire(self, tenant_id: str, name: str, actor: Actor) -> list[str]:
        """Nobody finds the name any more. → digests that no version refers to now: engines may evict them.

        Raises AdapterNotFound.
        """
        async with self._change(tenant_id) as session:
            row = await queries.live(session, tenant_id, name, lock=True)
            return await _retire(session, row, actor)

    async def retire_version(self, tenant_id: str, name: str, version: int, actor: Actor) -> list[str]:
        """The same for one version that nothing points at. Raises AdapterNotFound, VersionInUse."""
        async with self._change(tenant_id) as session:
            row = await queries.live(session, tenant_id, name, lock=True)
            adapter = await queries.adapter_of(session, row)
            digest = adapter.version(version).digest
            holders = [f"{name}:{alias}" for alias, number in adapter.aliases.items() if number == version]
            holders += ["the canary"] if row.canary == version else []
            holders += ["the current version"] if row.current == version else []
            if holders:
                raise VersionInUse("version_in_use", f"version {version} is {', '.join(holders)}", "version")
            mine = (VersionRow.adapter_id == row.id, VersionRow.version == version)
            await session.execute(update(VersionRow).where(*mine).values(retired_at=now()))
            await session.execute(
                delete(ActivationRow).where(ActivationRow.adapter_id == row.id, ActivationRow.version == version)
            )
            was = {"version": version, "digest": digest}
            audit.append(session, actor, Act("adapter.delete_version", tenant_id, f"{name}@{version}", was))
            return await _unused(session, {digest})

    async def retire_all(self, tenant_id: str, actor: Actor) -> list[str]:
        """Every adapter of a tenant, as retire()."""
        async with self._change(tenant_id) as session:
            query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.retired_at.is_(None))
            rows = list(await session.scalars(query.with_for_update()))
            return sorted({digest for row in rows for digest in await _retire(session, row, actor)})

    async def use(self, tenant_id: str) -> AdapterUse:
        """What the tenant has, and may have. Raises TenantNotFound."""
        async with self._database.session() as session:
            return await read_use(session, tenant_id, self._limits)

    async def get(self, tenant_id: str, name: str) -> Adapter:
        """One adapter of exactly this tenant. Raises AdapterNotFound."""
        async with self._database.session() as session:
            return await queries.adapter_of(session, await queries.live(session, tenant_id, name))

    async def page(self, tenant_id: str, after: str | None = None, limit: int = 100) -> tuple[list[Adapter], bool]:
        """A page of this tenant's adapters in the order of names, and whether there are more."""
        query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.retired_at.is_(None))
        query = query.order_by(AdapterRow.name).limit(limit + 1)
        if after is not None:
            query = query.where(AdapterRow.name > after)
        async with self._database.session() as session:
            rows = list(await session.scalars(query))
            return await queries.adapters_of(session, rows[:limit]), len(rows) > limit

    async def visible(self, tenant_id: str) -> dict[str, Resolved]:
        """Everything that this tenant may call, aliases too: its own, and the shared ones that it has no own for."""
        async with self._database.session() as session:
            return await queries.visible(session, tenant_id)

    async def resolve(self, tenant_id: str, name: str) -> Resolved | None:
        """What `name`, `name@version` or `name:alias` means to this tenant now; None if it means nothing."""
        async with self._database.session() as session:
            return await queries.resolve(session, tenant_id, name)

    async def collect(self, store: AdapterStore, grace_s: float) -> list[str]:
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

    async def _check_room(self, session: AsyncSession, tenant_id: str, stored: Stored, count: int) -> None:
        await check_room(session, tenant_id, self._limits, stored.digest, stored.size_bytes, count)

    def _add_version(self, session: AsyncSession, row: AdapterRow, stored: Stored) -> VersionRow:
        row.last_version += 1
        row.updated_at = now()
        spec = stored.spec
        version = VersionRow(
            adapter_id=row.id, version=row.last_version, digest=stored.digest, rank=spec.rank,
            target_modules=list(spec.target_modules), num_modules=len(spec.modules), num_tensors=spec.num_tensors,
            size_bytes=stored.size_bytes, packed_bytes=spec.packed_bytes, base_model=spec.base_model,
            warnings=list(spec.warnings), base_fingerprint=self.base,
            companions=dict(stored.companions), num_added=spec.num_added,
        )  # fmt: skip
        session.add(version)
        return version


def _taken(name: str) -> NameTaken:
    return NameTaken("adapter_exists", f"there is an adapter named {name}", "name")


def _check_alias(alias: str) -> None:
    if not ALIAS.fullmatch(alias):
        raise NameInvalid("name_invalid", f"an alias must match {ALIAS.pattern}", "alias")
    if alias in RESERVED_ALIASES:
        raise NameInvalid("name_reserved", f"an alias can't be called {alias}", "alias")


async def _retire(session: AsyncSession, row: AdapterRow, actor: Actor) -> list[str]:
    mine = (VersionRow.adapter_id == row.id, VersionRow.retired_at.is_(None))
    digests = set(await session.scalars(select(VersionRow.digest).where(*mine)))
    audit.append(session, actor, Act("adapter.delete", row.tenant_id, row.name, _state(row)))
    row.retired_at = now()
    row.canary = row.canary_percent = 0
    row.probes = []
    await session.flush()
    await session.execute(update(VersionRow).where(*mine).values(retired_at=row.retired_at))
    for table in (AliasRow, ActivationRow):
        await session.execute(delete(table).where(table.adapter_id == row.id))
    return await _unused(session, digests)


async def _unused(session: AsyncSession, digests: set[str]) -> list[str]:
    """Those that no live version has."""
    used = select(VersionRow.digest).where(VersionRow.digest.in_(digests), VersionRow.retired_at.is_(None))
    return sorted(digests - set(await session.scalars(used)))


def _described(row: VersionRow) -> dict[str, Any]:
    return {"version": row.version, "digest": row.digest, "rank": row.rank, "size_bytes": row.size_bytes}


def _forced(is_forced: bool) -> dict[str, Any]:
    return {"forced": True} if is_forced else {}


def _state(row: AdapterRow) -> dict[str, Any]:
    """What answers, as the audit log keeps it."""
    canary = {"canary": row.canary, "percent": row.canary_percent} if row.canary else {}
    return {"current": row.current} | canary
