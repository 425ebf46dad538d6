"""KVOwners: whose KV blocks there are, and the end of those whose owner is no more. Knows owners as opaque bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.block_pool import OWNER_BYTES, BlockPool
from engine.kv_tiers import KVTiers


class KVOwners:
    """Blocks are looked through only when one of their owners has gone: a word that changes nothing costs nothing."""

    def __init__(self, pool: BlockPool, tiers: KVTiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._known: set[bytes] = tiers.owners

    def note(self, owner: bytes) -> None:
        """Blocks of this owner may come to be."""
        self._known.add(owner.ljust(OWNER_BYTES, b"\0"))

    def keep(self, owners: Collection[bytes], busy: Iterable[bytes]) -> None:
        """Blocks of all others go from every tier; `busy` are those of running requests, which may leave more."""
        gone = self._known.difference(owners)
        if gone:
            self._pool.forget(gone)
            self._tiers.forget(gone)
            self._known -= gone
        for owner in busy:
            self.note(owner)
