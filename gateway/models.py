"""ModelTable: what a tenant may call, by name: the base model, its own adapters, shared ones. The last use of names.

ModelNotFound      nobody has it, others have it, or it is not on the caller's allow-lists: one and the same
AdapterMismatch    the caller's, but made for another base model than is served
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adapters.records import fits
from adapters.spec import AdapterRef
from tenants.limits import may_call

if TYPE_CHECKING:
    from adapters.records import Resolved
    from adapters.registry import AdapterRegistry
    from tenants.keys import Principal

CACHE_SIZE = 10_000
MAX_NAME = 256
_SUFFIX = re.compile("[@:]")


class ModelNotFound(Exception):
    """The caller can't call a model of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class AdapterMismatch(Exception):
    """The model of this name was made for another base model: it is not served, and nothing in its place."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Model:
    """What a name stands for now. `adapter` None = the base model; `owner` "" = shared or base. `target` is the model's
    own name, without a version, where `name` is how the tenant calls it. `companions` are files
    that the version brings along, with their sha256. `canary` answers `canary_percent` of the conversations in its
    place."""

    name: str
    target: str
    adapter: AdapterRef | None = None
    version: int | None = None
    owner: str = ""
    created: int = 0
    companions: tuple[tuple[str, str], ...] = ()
    canary: Model | None = None
    canary_percent: int = 0

    def chosen(self, conversation: Callable[[], str]) -> Model:
        """The one of the two that answers this conversation: always the same one, and with a larger percentage the
        canary keeps those that it has."""
        if self.canary is None:
            return self
        seed = f"{self.owner}\0{self.target}\0{self.canary.version}\0{conversation()}"
        point = int.from_bytes(hashlib.sha256(seed.encode("utf-8", "replace")).digest()[:8]) / 2**64
        return self.canary if 100 * point < self.canary_percent else self


class ModelTable:
    """Names → models, cached as long as the tenant's epoch stands still: hold() notices when it moved.

    max_model_len   tokens of prompt and output, as model lists show it
    """

    def __init__(self, registry: AdapterRegistry, base: Model, max_model_len: int) -> None:
        self.base = base
        self.max_model_len = max_model_len
        self._registry = registry
        self._cache: OrderedDict[tuple[str, str], tuple[int, Model]] = OrderedDict()

    async def resolve(
        self, principal: Principal, name: str, renew: Callable[[], Awaitable[Principal]]
    ) -> tuple[Principal, Model]:
        """Raises ModelNotFound, AdapterMismatch; before the first it makes sure that the principal is up to date."""
        model = await self._find(principal, name)
        if model is not None:
            return principal, model
        return await self.renewed(name, renew)

    async def renewed(self, name: str, renew: Callable[[], Awaitable[Principal]]) -> tuple[Principal, Model]:
        """As resolve(), with a principal that is read anew first."""
        principal = await renew()
        model = await self._find(principal, name)
        if model is None:
            raise ModelNotFound(name)
        return principal, model

    async def visible(self, principal: Principal) -> list[Model]:
        """Everything that the caller may call: the base model first, then adapters by name."""
        adapters = await self._registry.visible(principal.tenant_id)
        models = [
            _model(name, row) for name, row in adapters.items() if fits(row.base_fingerprint, self._registry.base)
        ]
        found = {model.name: model for model in (self.base, *models) if self._is_allowed(principal, model.name)}
        for own_name in principal.model_names:
            with suppress(AdapterMismatch):
                model = await self._find(principal, own_name)
                if model is not None:
                    found[own_name] = model
        return list(found.values())

    async def _find(self, principal: Principal, name: str) -> Model | None:
        own_name = principal.model_names.get(name, name)
        if len(name) > MAX_NAME or not self._is_allowed(principal, own_name):
            return None
        if own_name == self.base.name:
            return self.base if name == self.base.name else replace(self.base, name=name)
        key = (principal.tenant_id, name)
        epoch, model = self._cache.get(key, (None, None))
        if model is not None and epoch == principal.epoch:
            self._cache.move_to_end(key)
            return model
        row = await self._registry.resolve(principal.tenant_id, own_name)
        if row is None:
            self._cache.pop(key, None)
            return None
        if not fits(row.base_fingerprint, self._registry.base):
            raise AdapterMismatch(name)
        model = _model(name, row)
        if row.candidate is not None and fits(row.candidate.base_fingerprint, self._registry.base):
            canary = replace(
                model, adapter=row.candidate.ref, version=row.candidate.version, companions=row.candidate.companions
            )
            model = replace(model, canary=canary, canary_percent=row.candidate.percent)
        self._cache[key] = (principal.epoch, model)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return model

    def _is_allowed(self, principal: Principal, name: str) -> bool:
        """A name with a version or alias is allowed where the name is: they are no way around an allow-list."""
        target = name if name == self.base.name else _SUFFIX.split(name, maxsplit=1)[0]
        return may_call(target, principal.models, principal.key_models)


def _model(name: str, row: Resolved) -> Model:
    return Model(name, row.name, row.ref, row.version, row.tenant_id, row.created, row.companions)
