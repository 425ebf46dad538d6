"""Pins: adapters that operators want to stay in the engines' memory, by tenant and name. Kept in Redis, told to every
engine again and again: an engine that restarts, a new version and a deleted name need no words of their own."""

from __future__ import annotations

import json

from adapters.records import Adapter, AdapterNotFound
from adapters.registry import AdapterRegistry
from adapters.spec import AdapterRef
from gateway.replicas import ReplicaSet
from tenants.periodic import Periodic
from tenants.state import Client

KEY = "chorus:pins"
"""Hash of [tenant, name] → bytes in the engine."""
SYNC_S = 2.0

_ADD = """
local sum = tonumber(ARGV[2])
local pins = redis.call('HGETALL', KEYS[1])
for i = 1, #pins, 2 do
  if pins[i] ~= ARGV[1] then sum = sum + tonumber(pins[i + 1]) end
end
if sum > tonumber(ARGV[3]) then return 'full' end
if redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) == 1 then return 'new' end
return 'known'
"""


class PinsFull(Exception):
    """Pinned adapters would take memory that others need to be loaded at all."""


class Pins(Periodic):
    """`async with pins:` tells the engines every SYNC_S."""

    def __init__(self, redis: Client, registry: AdapterRegistry, replicas: ReplicaSet) -> None:
        super().__init__(self.sync, SYNC_S)
        self._redis = redis
        self._registry = registry
        self._replicas = replicas
        self._add = redis.register_script(_ADD)

    async def add(self, adapter: Adapter) -> bool:
        """Pins its current version, and whatever version will be current. False: it was pinned. Raises PinsFull or
        Unavailable."""
        ready = self._replicas.ready()
        size = adapter.version().ref.size_bytes * (2 if ready.dtype == "float32" else 1)
        field = _field(adapter.tenant_id, adapter.name)
        found = await self._add(keys=[KEY], args=[field, size, ready.pin_memory_bytes])
        if found == "full":
            raise PinsFull
        await self.sync()
        return bool(found == "new")

    async def remove(self, tenant_id: str, name: str) -> bool:
        """False: it was not pinned."""
        is_gone = bool(await self._redis.hdel(KEY, _field(tenant_id, name)))
        await self.sync()
        return is_gone

    async def sync(self) -> None:
        """Tells the engines what is pinned now; forgets names that are gone."""
        refs: list[AdapterRef] = []
        for field in sorted(await self._redis.hkeys(KEY)):
            tenant_id, name = json.loads(field)
            try:
                refs.append((await self._registry.get(tenant_id, name)).version().ref)
            except AdapterNotFound:
                await self._redis.hdel(KEY, field)
        await self._replicas.keep(refs)


def _field(tenant_id: str, name: str) -> str:
    return json.dumps([tenant_id, name], separators=(",", ":"))
