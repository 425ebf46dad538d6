"""Limits: numbers that a tenant or a key may not exceed; and the rules for names and models. Knows no Redis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Ids of tenants: safe in paths, logs and Redis keys."""
PRIORITIES = {"interactive": 0, "standard": 1, "batch": 2}
MAX_LIMIT = 10**12


class InvalidSettings(ValueError):
    """A value that can't be. `param` names the field, such as "limits.concurrency"."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Limits:
    """Limits of a tenant or a key; None = unlimited, 0 = nothing. Raises InvalidSettings."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.as_dict().items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
                raise InvalidSettings(f"{name} must be null or an integer from 0 to {MAX_LIMIT}", f"limits.{name}")

    def as_dict(self) -> dict[str, int]:
        """Only what is limited: the form in which it is stored."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Limits:
        """From names and numbers; an unknown name raises InvalidSettings."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidSettings(f"unknown limit {name!r}; known: {', '.join(sorted(known))}", f"limits.{name}")
        return cls(**values)


def check_models(models: Iterable[str] | None) -> list[str] | None:
    """Names or globs of models, as they are stored. Raises InvalidSettings."""
    if models is None:
        return None
    found = list(models)
    if not all(isinstance(model, str) and 0 < len(model) <= 256 for model in found):
        raise InvalidSettings("models must be null or a list of names or globs of 1 to 256 characters", "models")
    return found


def check_name(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise InvalidSettings("name must be a string of 1 to 256 characters", "name")
    return name


def may_call(model: str, *allow_lists: tuple[str, ...] | None) -> bool:
    """Is `model` on every allow-list? None allows all, an empty list nothing."""
    return all(patterns is None or any(fnmatchcase(model, pattern) for pattern in patterns) for patterns in allow_lists)
