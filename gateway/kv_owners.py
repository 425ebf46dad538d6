"""KVOwners: tells the engines whose KV blocks may stay, again and again: an engine that was away while a tenant was
deleted, or its retention changed, needs no words of its own."""

from __future__ import annotations

import logging
import time

from gateway.replicas import ReplicaSet
from tenants.db import StateUnavailable
from tenants.owners import OwnerBook
from tenants.periodic import Periodic

log = logging.getLogger("chorus.gateway")
SYNC_S = 15.0


class KVOwners(Periodic):
    """`async with owners:` tells every SYNC_S."""

    def __init__(self, book: OwnerBook, replicas: ReplicaSet) -> None:
        super().__init__(self._tell, SYNC_S)
        self._book = book
        self._replicas = replicas

    async def sync(self) -> None:
        """Tells every engine that answers. Raises StateUnavailable."""
        await self._replicas.keep_owners(await self._book.owners(time.time()))

    async def _tell(self) -> None:
        try:
            await self.sync()
        except StateUnavailable as error:
            log.warning("the engines were not told whose KV blocks may stay: %s", error)
