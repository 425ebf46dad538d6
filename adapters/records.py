"""What the registry takes and gives, and its errors. Knows no database.

RegistryError          has .code, .message, .param
├── NameInvalid        the name doesn't fit the pattern, or is reserved
├── NameTaken          there is an adapter of this name
├── VersionConflict    the current version is another one than the caller believed
└── AdapterNotFound    no such name, or no such version: not told apart
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from adapters.spec import AdapterRef, AdapterSpec, shown

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


class AdapterNotFound(RegistryError):
    """No such name, or no such version."""


@dataclass(frozen=True)
class Stored:
    """An adapter that was validated and committed to the store. `size_bytes` is of its files."""

    digest: str
    spec: AdapterSpec
    size_bytes: int


@dataclass(frozen=True)
class Version:
    """One immutable version. `packed_bytes` is what it takes in the engine at 2 bytes per element."""

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

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.digest, self.rank, self.packed_bytes)


@dataclass(frozen=True)
class Adapter:
    """A name and all of its versions, oldest first."""

    tenant_id: str
    name: str
    current: int
    versions: tuple[Version, ...]
    created_at: datetime
    updated_at: datetime

    def version(self, number: int | None = None) -> Version:
        """The current one, or number `number`. Raises AdapterNotFound."""
        wanted = self.current if number is None else number
        found = next((version for version in self.versions if version.version == wanted), None)
        if found is None:
            raise not_found(self.name)
        return found


@dataclass(frozen=True)
class Resolved:
    """What a name meant at this moment. `tenant_id` is the owner's ("" = shared)."""

    tenant_id: str
    name: str
    version: int
    ref: AdapterRef
    created_at: datetime

    @property
    def created(self) -> int:
        """Seconds since 1970, as model lists show it."""
        return int(self.created_at.timestamp())

    @property
    def is_shared(self) -> bool:
        return self.tenant_id == SHARED


def not_found(name: str) -> AdapterNotFound:
    return AdapterNotFound("adapter_not_found", f"there is no adapter {shown(name)}", "name")
