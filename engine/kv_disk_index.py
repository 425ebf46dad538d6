"""DiskIndex: which KV blocks the disk tier holds, by key, within a limit of bytes. Knows no files.

Its bytes count from the moment a block is promised; it can be found once it is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from engine.block_pool import owner_in


class DiskIndex:
    """Sibling of BlockPool; the least recently used goes first. `num_evictions` counts those that went for others."""

    def __init__(self, limit_bytes: int, found: Iterable[tuple[bytes, int]] = ()) -> None:
        """`found` are (key, bytes) that are there already, the least recently used first."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.num_evictions = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict(found)
        self._promised: dict[bytes, int] = {}
        self.used_bytes = sum(self._sizes.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def promise(self, key: bytes, num_bytes: int) -> list[bytes] | None:
        """Counts a block that is about to be written. Returns the keys that went for it; None: it can't be taken."""
        if key in self._sizes or key in self._promised or num_bytes > self.limit_bytes - sum(self._promised.values()):
            return None
        self._promised[key] = num_bytes
        self.used_bytes += num_bytes
        return self.trim()

    def trim(self) -> list[bytes]:
        """Forgets what is above the limit. Returns the keys."""
        gone = []
        while self.used_bytes > self.limit_bytes:
            key, num_bytes = self._sizes.popitem(last=False)
            self.used_bytes -= num_bytes
            self.num_evictions += 1
            gone.append(key)
        return gone

    def keep(self, key: bytes) -> None:
        """The promised block is written."""
        if key in self._promised:  # else it was dropped meanwhile
            self._sizes[key] = self._promised.pop(key)

    def touch(self, key: bytes) -> None:
        """It becomes the most recently used."""
        self._sizes.move_to_end(key)

    def drop(self, key: bytes) -> None:
        """It is gone, or could not be written. What is unknown is no error: it may just have been trimmed."""
        self.used_bytes -= self._sizes.pop(key, 0) + self._promised.pop(key, 0)

    @property
    def owners(self) -> set[bytes]:
        """Whose blocks there are."""
        return {owner_in(key) for key in (*self._sizes, *self._promised)}

    def forget(self, owners: Collection[bytes]) -> list[bytes]:
        """Drops what is of these owners, written or promised. Returns the keys."""
        gone = [key for key in (*self._sizes, *self._promised) if owner_in(key) in owners]
        for key in gone:
            self.drop(key)
        return gone

    def check(self) -> None:
        """Asserts every invariant. For tests."""
        assert self.used_bytes == sum(self._sizes.values()) + sum(self._promised.values()) <= self.limit_bytes
        assert not self._sizes.keys() & self._promised.keys()
