"""AdapterLimits: how many adapters a tenant may keep, and how many bytes of them. Knows no adapters.

A tenant's own word goes before its plan's, and that before the settings'. Where a name is absent, the next one decides;
null = unlimited, 0 = nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenants.limits import InvalidSettings

DIMENSIONS = ("count", "bytes")
MAX_ADAPTER_LIMIT = 10**15


@dataclass(frozen=True)
class AdapterLimits:
    """count: names. bytes: of stored files, each once, however many versions refer to them. None = unlimited."""

    count: int | None = None
    bytes: int | None = None

    def under(self, *stated: Mapping[str, int | None]) -> AdapterLimits:
        """With what others say instead, the last of them first."""
        found: dict[str, int | None] = {"count": self.count, "bytes": self.bytes}
        for each in stated:
            found |= each
        return AdapterLimits(found["count"], found["bytes"])


def check_adapter_limits(stated: Mapping[str, int | None]) -> dict[str, int | None]:
    """As they are stored. Raises InvalidSettings."""
    for name, value in stated.items():
        if name not in DIMENSIONS:
            raise InvalidSettings(f"unknown limit {name!r}; known: {', '.join(DIMENSIONS)}", f"adapter_limits.{name}")
        is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ADAPTER_LIMIT
        if value is not None and not is_number:
            message = f"{name} must be null or an integer from 0 to {MAX_ADAPTER_LIMIT}"
            raise InvalidSettings(message, f"adapter_limits.{name}")
    return dict(stated)
