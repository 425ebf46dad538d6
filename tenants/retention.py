"""Retention: how long the texts of a tenant, prompts and answers, may be kept. Numbers only: knows no text.

As an API says it   null = as long as the server's settings say · "none" · hours
As it is stored     None                                        · 0      · hours
"""

from __future__ import annotations

from tenants.limits import InvalidSettings

NONE = "none"
MAX_HOURS = 10 * 8766
"""Ten years."""
HOUR_S = 3600


def check_retention(value: int | str | None) -> int | None:
    """As it is stored. Raises InvalidSettings."""
    if value == NONE:
        return 0
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_HOURS):
        return value
    raise InvalidSettings(f'retention must be null, "none" or hours from 1 to {MAX_HOURS}', "retention")


def retention_of(stored: int | None) -> int | str | None:
    """As an API says it."""
    return NONE if stored == 0 else stored


def seconds_of(stored: int | None) -> int | None:
    """None = as the server's settings say, 0 = not at all."""
    return None if stored is None else stored * HOUR_S
