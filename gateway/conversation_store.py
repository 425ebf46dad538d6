"""ConversationStore: the Conversations of every tenant, and how long they are kept. Knows no item and no HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from gateway import conversation_scripts as scripts
from gateway.conversations import Conversations
from tenants.keys import Principal
from tenants.state import Client

NAMES = ("CREATE", "APPEND", "UPDATE", "DELETE", "DELETE_ITEM", "PAGE", "BEGIN", "HOLD", "COMMIT", "CHAIN")
TEXTS = ("resp", "conv", "replay")
"""What a tenant's keys with texts begin with, after its slot: responses, conversations, answers to be given again."""
Keeping = Callable[[str], Awaitable[tuple[int | None, int]]]
"""Of a tenant: how many seconds its texts may be kept (None = as the settings say), and the epoch as of which."""


class ConversationStore:
    """Every method raises RedisUnavailable when Redis is away."""

    def __init__(self, redis: Client, ttl_s: int, keeping: Keeping) -> None:
        """`ttl_s` after their last use, unless the tenant wants less."""
        self.redis = redis
        self._ttl_s = ttl_s
        self._keeping = keeping
        self._scripts = {name: redis.register_script(getattr(scripts, name)) for name in NAMES}

    def of(self, principal: Principal) -> Conversations:
        return Conversations(self, principal.tenant_id, self.ttl_s(principal.retention_s), principal.epoch)

    def ttl_s(self, retention_s: int | None) -> int:
        """0 = not kept at all."""
        return self._ttl_s if retention_s is None else min(self._ttl_s, retention_s)

    async def keeping(self, tenant: str) -> tuple[int, int]:
        """How long the tenant's texts are kept by now, and the epoch as of which. Raises what `keeping` raises."""
        retention_s, epoch = await self._keeping(tenant)
        return self.ttl_s(retention_s), epoch

    async def limit(self, tenant: str, retention_s: int | None) -> None:
        """Nothing that is stored now lives longer than this; 0 erases it. Takes time: it looks at all keys."""
        ttl_s = self.ttl_s(retention_s)
        for kind in TEXTS:
            async for key in self.redis.scan_iter(f"{{t:{tenant}}}:{kind}:*", count=1000):
                await (self.redis.expire(key, ttl_s, lt=True) if ttl_s else self.redis.unlink(key))
        if not ttl_s:
            with suppress(ResponseError):  # one is under way, or Redis is somebody else's
                await self.redis.bgrewriteaof()

    async def call(self, name: str, keys: list[str], args: list[Any]) -> Any:
        return await self._scripts[name](keys=keys, args=args)
