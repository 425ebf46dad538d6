"""HostPool: slots of host memory for KV blocks that left the device, by number, found by key. Knows no bytes.

A slot is free, filled (known by its key; least recently used goes first) or pinned: somebody copies from or to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from engine.block_pool import owner_in


class HostPool:
    """Sibling of BlockPool. `num_evictions` counts known blocks that were forgotten for others, ever."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self._pins = [0] * num_slots
        self._key_of: list[bytes | None] = [None] * num_slots
        self._slot_of: dict[bytes, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    @property
    def num_filled(self) -> int:
        """Slots that are known by a key."""
        return len(self._slot_of)

    def find(self, key: bytes) -> int | None:
        """Its slot; it becomes the most recently used."""
        slot = self._slot_of.get(key)
        if slot is not None and slot in self._idle:
            self._idle.move_to_end(slot)
        return slot

    def take(self) -> int | None:
        """A slot of unknown content, pinned once; the least recently used block is forgotten for it. None: all are
        pinned."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot, _none = self._idle.popitem(last=False)
            self._forget(slot)
            self.num_evictions += 1
        else:
            return None
        self._pins[slot] = 1
        return slot

    def know(self, slot: int, key: bytes) -> None:
        """What this pinned slot holds, or will hold before anybody reads it."""
        assert self._pins[slot]
        assert self._key_of[slot] is None
        assert key not in self._slot_of
        self._key_of[slot] = key
        self._slot_of[key] = slot

    def pin(self, slot: int) -> None:
        """Its content stays until it is unpinned."""
        self._idle.pop(slot, None)
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """One copy less; without a key it is free again after the last."""
        self._pins[slot] -= 1
        assert self._pins[slot] >= 0
        if not self._pins[slot]:
            if self._key_of[slot] is None:
                self._free.append(slot)
            else:
                self._idle[slot] = None

    def forget(self, owners: Collection[bytes]) -> None:
        """Nobody finds the blocks of these owners any more; a pinned slot is free after the last copy."""
        for key in [key for key in self._slot_of if owner_in(key) in owners]:
            slot = self._slot_of[key]
            self._forget(slot)
            if slot in self._idle:
                del self._idle[slot]
                self._free.append(slot)

    def check(self, num_pins: int) -> None:
        """Asserts every invariant, given how many pins there are. For tests: O(num_slots)."""
        assert sum(self._pins) == num_pins
        unpinned = {slot for slot, pins in enumerate(self._pins) if not pins}
        assert sorted([*self._free, *self._idle]) == sorted(unpinned)
        assert all(self._key_of[slot] is None for slot in self._free)
        assert all(self._key_of[slot] is not None for slot in self._idle)
        assert {key: slot for slot, key in enumerate(self._key_of) if key is not None} == self._slot_of

    def _forget(self, slot: int) -> None:
        key = self._key_of[slot]
        assert key is not None
        del self._slot_of[key]
        self._key_of[slot] = None
