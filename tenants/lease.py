"""Lease: one process at a time does what would be wasted, or done twice, by several. Kept in Redis; it saves work and
keeps order, but what is done under it must be safe without: a process that is stopped for long loses it unnoticed."""

from __future__ import annotations

import secrets

from tenants.state import Client, Script

_TAKE = Script("""
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
""")
_GIVE = Script("if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0")


class Lease:
    """Named by its key; each Lease object is a holder of its own. Raises RedisUnavailable."""

    def __init__(self, redis: Client, key: str, seconds: float) -> None:
        self._redis = redis
        self._key = key
        self._ms = int(seconds * 1000)
        self._holder = secrets.token_hex(8)

    async def take(self) -> bool:
        """Ours for so many seconds from now; False: it is another's."""
        return bool(await _TAKE(self._redis, [self._key], [self._holder, self._ms]))

    async def give(self) -> None:
        """Another may take it at once."""
        await _GIVE(self._redis, [self._key], [self._holder])
