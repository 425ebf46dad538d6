"""DayChanges: what new entries of the usage ledger change in the sums per day, which reports read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from tenants.models import UsageDay

CORRECTION = "correction"
"""The status of an entry that is no attempt."""
_SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens")
_DAY_KEY = tuple(UsageDay.__table__.primary_key)


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
        if not rows:
            return
        statement = insert(UsageDay.__table__)
        added = {name: getattr(UsageDay, name) + statement.excluded[name] for name in ("attempts", *_SUMMED)}
        connection = await session.connection()
        await connection.execute(statement.on_conflict_do_update(index_elements=names, set_=added), rows)
