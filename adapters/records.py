"""What the registry takes and gives, and its errors. Knows no database.

RegistryError          has .code, .message, .param
├── NameInvalid        the name (or alias) doesn't fit the pattern, or is reserved
├── NameTaken          there is an adapter of this name
├── VersionConflict    the current version, canary or alias is another one than the caller believed
├── VersionInUse       it is current, a canary or behind an alias, and can't be deleted
├── NoEarlierVersion   nothing was current before, so nothing can be rolled back to
├── BaseMismatch       the version is for another base model than this one
└── AdapterNotFound    no such name, or no such version or alias: not told apart
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from adapters.spec import AdapterRef, AdapterSpec, shown

Probes = list[dict[str, Any]]
"""As gateway.probes checks and runs them."""
Companions = tuple[tuple[str, str], ...]
SHARED = ""
"""The tenant of adapters that everyone may call."""


class RegistryError(Exception):
    """A name or version can't be used so. `code` is stable, `param` names the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class NameInvalid(RegistryError):
    """The name doesn't fit the pattern, or is reserved."""


class NameTaken(RegistryError):
    """There is an adapter of this name."""


class VersionConflict(RegistryError):
    """Another version is current than the caller believed."""


class VersionInUse(RegistryError):
    """It is current, a canary or behind an alias."""


class NoEarlierVersion(RegistryError):
    """Nothing was current before."""


class BaseMismatch(RegistryError):
    """The version was validated for another base model."""


class AdapterNotFound(RegistryError):
    """No such name, version or alias."""


@dataclass(frozen=True)
class Stored:
    """An adapter that was validated and committed to the store. `size_bytes` is of its files; `companions` are those
    that it brings along beside config and weights (adapters.storage.COMPANION_FILES), each with its sha256. `probes`
    come with it and take the place of those that the name has; None = they stay. `is_forced`: they were not asked."""

    digest: str
    spec: AdapterSpec
    size_bytes: int
    companions: Companions = ()
    probes: Probes | None = None
    is_forced: bool = False


@dataclass(frozen=True)
class Version:
    """One immutable version. `packed_bytes` is what it takes in the engine at 2 bytes per element, `num_added` how many
    tokens it adds to the vocabulary."""

    version: int
    digest: str
    rank: int
    target_modules: tuple[str, ...]
    num_modules: int
    num_tensors: int
    size_bytes: int
    packed_bytes: int
    base_model: str | None
    warnings: tuple[str, ...]
    created_at: datetime
    base_fingerprint: str = ""
    companions: Companions = ()
    num_added: int = 0

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.digest, self.rank, self.packed_bytes, self.num_added)

    def fits(self, base: str) -> bool:
        return fits(self.base_fingerprint, base)

    def check_base(self, name: str, base: str) -> None:
        """Raises BaseMismatch unless it is for the base model of this fingerprint."""
        if not self.fits(base):
            message = f"version {self.version} of {name} was made for another base model than is served now"
            raise BaseMismatch("base_mismatch", message, "version")


@dataclass(frozen=True)
class Canary:
    """A version that answers `percent` (1 to 99) of the conversations in place of the current one."""

    version: int
    percent: int


@dataclass(frozen=True)
class Adapter:
    """A name and all of its versions, oldest first.

    previous   what a rollback would make current; None = there is nothing
    aliases    alias → version
    probes     what a version must answer before it becomes current
    """

    tenant_id: str
    name: str
    current: int
    versions: tuple[Version, ...]
    created_at: datetime
    updated_at: datetime
    previous: int | None = None
    canary: Canary | None = None
    aliases: Mapping[str, int] = field(default_factory=dict)
    probes: Probes = field(default_factory=list)

    def version(self, number: int | None = None) -> Version:
        """The current one, or number `number`. Raises AdapterNotFound."""
        wanted = self.current if number is None else number
        found = next((version for version in self.versions if version.version == wanted), None)
        if found is None:
            raise not_found(self.name)
        return found


@dataclass(frozen=True)
class Move:
    """Which version shall answer `percent` of the conversations: 100 makes it current and ends a canary, less makes it
    the canary, 0 ends that. Only if `if_current` (when given) is current and `if_canary` (0 = none) the canary.
    `is_forced`: probes were not asked."""

    version: int
    percent: int = 100
    if_current: int | None = None
    if_canary: int | None = None
    is_forced: bool = False


@dataclass(frozen=True)
class Candidate:
    """The canary of a name: which version, and how many of a hundred conversations it answers."""

    version: int
    percent: int
    ref: AdapterRef
    base_fingerprint: str = ""
    companions: Companions = ()


@dataclass(frozen=True)
class Resolved:
    """What a name meant at this moment. `tenant_id` is the owner's ("" = shared); `candidate` only where the name was
    asked for without version or alias."""

    tenant_id: str
    name: str
    version: int
    ref: AdapterRef
    created_at: datetime
    base_fingerprint: str = ""
    companions: Companions = ()
    candidate: Candidate | None = None

    @property
    def created(self) -> int:
        """Seconds since 1970, as model lists show it."""
        return int(self.created_at.timestamp())

    @property
    def is_shared(self) -> bool:
        return self.tenant_id == SHARED


def not_found(name: str) -> AdapterNotFound:
    return AdapterNotFound("adapter_not_found", f"there is no adapter {shown(name)}", "name")


def fits(fingerprint: str, base: str) -> bool:
    """Is a version that was validated for the base of this fingerprint one for `base`? "" = unknown, which fits all."""
    return not fingerprint or not base or fingerprint == base
