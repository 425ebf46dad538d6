"""Queries of the adapter tables, inside a session of the caller: rows by name, adapters with all that belongs to them,
what a name means. Changes nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from adapters.records import SHARED, Adapter, Canary, Candidate, Resolved, Version, not_found
from adapters.rows import ActivationRow, AdapterRow, AliasRow, VersionRow

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,31}")
_REFERENCE = re.compile(rf"({NAME.pattern})(?:@([1-9][0-9]{{0,8}})|:({ALIAS.pattern}))?")
_CanaryRow = aliased(VersionRow)


async def find(session: AsyncSession, tenant_id: str, name: str, lock: bool = False) -> AdapterRow | None:
    """The row of a name, retired or not."""
    query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
    found: AdapterRow | None = await session.scalar(query.with_for_update() if lock else query)
    return found


async def live(session: AsyncSession, tenant_id: str, name: str, lock: bool = False) -> AdapterRow:
    """Raises AdapterNotFound."""
    row = await find(session, tenant_id, name, lock) if NAME.fullmatch(name) else None
    if row is None or row.retired_at is not None:
        raise not_found(name)
    return row


async def adapter_of(session: AsyncSession, row: AdapterRow) -> Adapter:
    (found,) = await adapters_of(session, [row])
    return found


async def adapters_of(session: AsyncSession, rows: Sequence[AdapterRow]) -> list[Adapter]:
    """In the order of the rows."""
    ids = [row.id for row in rows]
    versions: defaultdict[int, list[Version]] = defaultdict(list)
    wanted = select(VersionRow).where(VersionRow.adapter_id.in_(ids), VersionRow.retired_at.is_(None))
    for version in await session.scalars(wanted.order_by(VersionRow.adapter_id, VersionRow.version)):
        versions[version.adapter_id].append(version_of(version))
    aliases: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for alias in await session.scalars(
        select(AliasRow).where(AliasRow.adapter_id.in_(ids)).order_by(AliasRow.adapter_id, AliasRow.alias)
    ):
        aliases[alias.adapter_id][alias.alias] = alias.version
    previous: dict[int, int] = {}
    current = {row.id: row.current for row in rows}
    for activation in await session.scalars(_activations(ids)):
        if activation.version != current[activation.adapter_id]:
            previous[activation.adapter_id] = activation.version
    return [
        Adapter(
            row.tenant_id, row.name, row.current, tuple(versions[row.id]), row.created_at, row.updated_at,
            previous=previous.get(row.id),
            canary=Canary(row.canary, row.canary_percent) if row.canary else None, aliases=aliases[row.id],
            probes=row.probes,
        )
        for row in rows
    ]  # fmt: skip


async def activations(session: AsyncSession, row: AdapterRow) -> list[ActivationRow]:
    """Those that no rollback took back, oldest first."""
    return list(await session.scalars(_activations([row.id])))


def _activations(adapter_ids: Sequence[int]) -> Any:
    query = select(ActivationRow).where(ActivationRow.adapter_id.in_(adapter_ids), ActivationRow.is_undone.is_(False))
    return query.order_by(ActivationRow.id)


def version_of(row: VersionRow) -> Version:
    return Version(
        row.version, row.digest, row.rank, tuple(row.target_modules), row.num_modules, row.num_tensors,
        row.size_bytes, row.packed_bytes, row.base_model, tuple(row.warnings), row.created_at, row.base_fingerprint,
        tuple(sorted(row.companions.items())), row.num_added,
    )  # fmt: skip


async def resolve(session: AsyncSession, tenant_id: str, name: str) -> Resolved | None:
    """What `name`, `name@version` or `name:alias` means to this tenant; None if it means nothing."""
    reference = _REFERENCE.fullmatch(name)
    if reference is None:
        return None
    own_name, version, alias = reference[1], reference[2], reference[3]
    query = _resolving(tenant_id, int(version) if version else None, alias).where(AdapterRow.name == own_name)
    row = (await session.execute(query.order_by(AdapterRow.tenant_id.desc()).limit(1))).first()
    return None if row is None or row[1] is None else _resolved(row, is_plain=not (version or alias))


async def visible(session: AsyncSession, tenant_id: str) -> dict[str, Resolved]:
    """Everything that this tenant may call: its own, the shared ones that it has no own for, and their aliases."""
    found: dict[str, Resolved] = {}
    for row in await session.execute(_resolving(tenant_id).order_by(AdapterRow.tenant_id)):
        found[row[0].name] = _resolved(row)  # the own one is last
    aliases = (
        select(AliasRow.alias, AdapterRow, VersionRow)
        .join(AdapterRow, AdapterRow.id == AliasRow.adapter_id)
        .join(VersionRow, (VersionRow.adapter_id == AliasRow.adapter_id) & (VersionRow.version == AliasRow.version))
        .where(AdapterRow.tenant_id.in_([tenant_id, SHARED]), AdapterRow.retired_at.is_(None))
        .where(VersionRow.retired_at.is_(None))
    )
    for alias, adapter, version in await session.execute(aliases):
        seen = found.get(adapter.name)
        if seen is not None and seen.tenant_id == adapter.tenant_id:
            found[f"{adapter.name}:{alias}"] = _resolved((adapter, version, None), is_plain=False)
    return {name: found[name] for name in sorted(found)}


def _resolving(tenant_id: str, version: int | None = None, alias: str | None = None) -> Any:
    """Live adapters that the tenant sees, each with the wanted version (or the current one; None if it lacks it) and
    the version that is its canary."""
    query = select(AdapterRow, VersionRow, _CanaryRow).select_from(AdapterRow)
    wanted: Any = AdapterRow.current if version is None else version
    if alias is not None:
        query = query.outerjoin(AliasRow, (AliasRow.adapter_id == AdapterRow.id) & (AliasRow.alias == alias))
        wanted = AliasRow.version
    is_it = (VersionRow.adapter_id == AdapterRow.id) & (VersionRow.version == wanted) & VersionRow.retired_at.is_(None)
    is_canary = (_CanaryRow.adapter_id == AdapterRow.id) & (_CanaryRow.version == AdapterRow.canary)
    return (
        query.outerjoin(VersionRow, is_it)
        .outerjoin(_CanaryRow, is_canary & _CanaryRow.retired_at.is_(None))
        .where(AdapterRow.tenant_id.in_([tenant_id, SHARED]), AdapterRow.retired_at.is_(None))
    )


def _resolved(row: Any, is_plain: bool = True) -> Resolved:
    adapter, version, canary = row
    candidate = None
    if is_plain and canary is not None:
        found = version_of(canary)
        candidate = Candidate(
            found.version, adapter.canary_percent, found.ref, found.base_fingerprint, found.companions
        )
    meant = version_of(version)
    return Resolved(
        adapter.tenant_id, adapter.name, meant.version, meant.ref, meant.created_at, meant.base_fingerprint,
        meant.companions, candidate,
    )  # fmt: skip
