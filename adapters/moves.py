"""Moves: which version of an adapter is current, which is its canary; forward, and back again. Inside a transaction of
the registry, on a row that it has locked."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapters import queries
from adapters.records import Adapter, Move, NoEarlierVersion, VersionConflict
from adapters.rows import ActivationRow, AdapterRow

MAX_HISTORY = 100
"""So many activations of a name are remembered."""


async def note_current(session: AsyncSession, row: AdapterRow, version: int) -> None:
    """Makes it current, which ends a canary."""
    row.canary = row.canary_percent = 0
    if row.current != version or not await queries.activations(session, row):
        session.add(ActivationRow(adapter_id=row.id, version=version))
    row.current = version
    await session.flush()
    newest = select(ActivationRow.id).where(ActivationRow.adapter_id == row.id)
    kept = newest.order_by(ActivationRow.id.desc()).limit(MAX_HISTORY).scalar_subquery()
    await session.execute(
        delete(ActivationRow).where(ActivationRow.adapter_id == row.id, ActivationRow.id.not_in(kept))
    )


async def move(session: AsyncSession, row: AdapterRow, adapter: Adapter, wanted: Move, base: str) -> None:
    """Raises AdapterNotFound, VersionConflict, BaseMismatch."""
    version = adapter.version(wanted.version)
    _check_current(row, wanted.if_current)
    if wanted.if_canary not in (None, row.canary):
        raise VersionConflict("conflict", f"the canary is version {row.canary or 'none'}", "if_canary")
    if wanted.percent == 0:
        if row.canary != wanted.version:
            raise VersionConflict("conflict", f"version {wanted.version} is not the canary", "version")
        row.canary = row.canary_percent = 0
    else:
        version.check_base(row.name, base)
        if wanted.percent == 100:
            await note_current(session, row, wanted.version)
        elif wanted.version == row.current:
            raise VersionConflict("conflict", f"version {wanted.version} is current already", "percent")
        else:
            row.canary, row.canary_percent = wanted.version, wanted.percent
    await session.flush()


async def roll_back(
    session: AsyncSession, row: AdapterRow, adapter: Adapter, if_current: int | None, base: str
) -> None:
    """Ends a canary, or undoes the last activation. Raises NoEarlierVersion, VersionConflict, BaseMismatch."""
    _check_current(row, if_current)
    if row.canary:
        row.canary = row.canary_percent = 0
    else:
        if adapter.previous is None:
            raise NoEarlierVersion("no_earlier_version", "no other version was current before this one")
        adapter.version(adapter.previous).check_base(row.name, base)
        for activation in reversed(await queries.activations(session, row)):
            if activation.version == adapter.previous:
                break
            activation.is_undone = True
        row.current = adapter.previous
    await session.flush()


def _check_current(row: AdapterRow, if_current: int | None) -> None:
    if if_current not in (None, row.current):
        raise VersionConflict("conflict", f"version {row.current} is current, not {if_current}", "if_current")
