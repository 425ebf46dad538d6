"""Limits: numbers that tenants, keys and models may not exceed; and the rules for names and models. Knows no Redis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Ids of tenants and plans: safe in paths, logs and Redis keys."""
PRIORITIES = {"interactive": 0, "standard": 1, "batch": 2}
MAX_LIMIT = 10**12
MAX_MODEL_LIMITS = 1000
BUDGETS = ("tokens_per_day", "tokens_per_month")
NUMBERS = ("requests_per_minute", "tokens_per_minute", "concurrency", *BUDGETS)
Mode = Literal["hard", "soft", "shadow"]


class InvalidSettings(ValueError):
    """A value that can't be. `param` names the field, such as "limits.concurrency"."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Limits:
    """Limits of a tenant, a key, a plan or a tenant's model; None = unlimited, 0 = nothing. Raises InvalidSettings.

    soft     budgets that are told when they are exceeded, but let everything through
    shadow   limits that only log what they would refuse: to try a number before it is enforced
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    soft: tuple[str, ...] = ()
    shadow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
                raise InvalidSettings(f"{name} must be null or an integer from 0 to {MAX_LIMIT}", f"limits.{name}")
        for param, known in (("soft", BUDGETS), ("shadow", NUMBERS)):
            names = getattr(self, param)
            if not isinstance(names, list | tuple) or not all(name in known for name in names):
                raise InvalidSettings(f"{param} must list names of {', '.join(known)}", f"limits.{param}")
            object.__setattr__(self, param, tuple(name for name in known if name in names))
        if set(self.soft) & set(self.shadow):
            raise InvalidSettings("a budget is either soft or in shadow", "limits.soft")

    def numbers(self) -> Mapping[str, int]:
        """Only what is limited."""
        return self._numbers

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: value for name in NUMBERS if (value := getattr(self, name)) is not None}

    def as_dict(self) -> dict[str, Any]:
        """The form in which it is stored."""
        modes = {param: list(names) for param in ("soft", "shadow") if (names := getattr(self, param))}
        return {**self.numbers(), **modes}

    def mode(self, name: str) -> Mode:
        """What happens when the limit of this name is exceeded."""
        return "shadow" if name in self.shadow else "soft" if name in self.soft else "hard"

    def over(self, plan: Limits) -> Limits:
        """These limits; what they leave open is the plan's, each with the mode that it has where it comes from."""
        own = self.numbers()
        modes = {name: (self if name in own else plan).mode(name) for name in NUMBERS}
        return Limits(
            **{**plan.numbers(), **own},
            soft=tuple(name for name, mode in modes.items() if mode == "soft"),
            shadow=tuple(name for name, mode in modes.items() if mode == "shadow"),
        )

    def with_changes(self, changes: Mapping[str, Any]) -> Limits:
        """These, changed as `changes["limits"]` says: a Limits replaces all, a mapping only those that it names."""
        asked = changes.get("limits", {})
        return asked if isinstance(asked, Limits) else Limits.of({**asdict(self), **asked})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Limits:
        """From names and values; an unknown name raises InvalidSettings."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidSettings(f"unknown limit {name!r}; known: {', '.join(sorted(known))}", f"limits.{name}")
        return cls(**values)


ModelLimits = Mapping[str, Limits]
"""The name of a model, without a version → its limits, for one tenant."""


def check_model_limits(limits: ModelLimits) -> dict[str, dict[str, Any]]:
    """As they are stored. Raises InvalidSettings."""
    if len(limits) > MAX_MODEL_LIMITS or not all(0 < len(name) <= 256 for name in limits):
        raise InvalidSettings(f"model_limits has up to {MAX_MODEL_LIMITS} names of 1 to 256 characters", "model_limits")
    return {name: found.as_dict() for name, found in limits.items()}


def model_limits_of(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Limits]:
    return {name: Limits.of(values) for name, values in stored.items()}


def check_model_names(names: Mapping[str, str]) -> dict[str, str]:
    """A tenant's own names for models → what they stand for, as they are stored. Raises InvalidSettings."""
    if len(names) > MAX_MODEL_LIMITS or not all(
        isinstance(text, str) and 0 < len(text) <= 256 for pair in names.items() for text in pair
    ):
        message = f"model_names has up to {MAX_MODEL_LIMITS} names of 1 to 256 characters, each for a model's name"
        raise InvalidSettings(message, "model_names")
    return dict(names)


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
