"""KVTiers: KV blocks that left the device: where they are, when they come back, and whether that is worth it.

    device ──evicted──▶ host pool ──written through──▶ disk
       ▲                   │  ▲                          │
       └──── loads ────────┘  └──────── reads ───────────┘

Blocks are found by the key of their content, so a sequence that gave up its blocks and a new one with a known prefix
come back in the same way, and what is lost on the way is computed again. Numbers only: bytes are moved by the runner
(HostMemory) and by the disk's threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Many
from typing import Literal

from engine.block_pool import BlockPool
from engine.cost_model import CostModel
from engine.kv_host_pool import HostPool
from engine.kv_traffic import DiskTraffic
from engine.sequence import Sequence

SwapPolicy = Literal["on", "off", "auto"]
Copies = tuple[tuple[int, int], ...]

READ_WAIT_S = 1.0
"""So long a request waits for its blocks to be read from the disk; then they are computed."""


class KVTiers:
    """Used by one thread. A host of no slots is no tier at all.

    num_stores, num_loads  blocks copied to the host and back, ever
    resumed                sequences that had given up their blocks and run again, by how: "swap" copied some back,
                           "recompute" computed some again, "kept" had lost none
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        cost: CostModel,
        policy: SwapPolicy = "auto",
        disk: DiskTraffic | None = None,
    ) -> None:
        self.host = host
        self.cost = cost
        self.disk = disk
        self.num_stores = 0
        self.num_loads = 0
        self.resumed = {"swap": 0, "recompute": 0, "kept": 0}
        self._policy = policy
        self._stores: dict[int, tuple[int, bytes]] = {}  # by slot: the block that goes there, and its key
        self._issued_stores: dict[int, tuple[int, bytes]] = {}
        self._arriving: dict[Sequence, deque[tuple[int, int]]] = {}  # (slot, block) that are not in a step yet
        self._issued_loads: list[tuple[Sequence, int]] = []
        self._patience: deque[float] = deque()  # when those that wait for the disk wait no more
        if host.num_slots:
            pool.on_evict = self._demote

    # ---- down

    def _demote(self, block: int, key: bytes) -> None:
        """The device forgets this block."""
        if self.host.find(key) is not None or not self._is_worth_it:
            return
        slot = self.host.take()
        if slot is not None:
            self.host.know(slot, key)
            self._stores[slot] = block, key

    # ---- up

    def must_wait(self, sequence: Sequence, keys: Many[bytes], now: float) -> bool:
        """The next blocks of this waiting sequence are being read from the disk, or begin to be. It waits only once,
        and not for long."""
        if self.disk is None or not keys or not self._may_restore(sequence):
            return False
        if sequence.read_until is None:
            if not self.disk.read(keys):
                return False
            sequence.read_until = now + READ_WAIT_S
            self._patience.append(sequence.read_until)
            return True
        return now < sequence.read_until and self.disk.awaits(keys)

    def claim(self, sequence: Sequence, keys: Many[bytes]) -> list[int]:
        """Slots of the leading blocks that the host has, pinned; none where computing is quicker."""
        slots: list[int] = []
        if not self.host.num_slots or not self._may_restore(sequence):
            return slots
        for key in keys:
            slot = self.host.find(key)
            if slot is None:
                break
            self.host.pin(slot)
            slots.append(slot)
        return slots

    def bring(self, sequence: Sequence, slots: list[int], blocks: list[int]) -> None:
        """The claimed slots go to these blocks of the sequence over the next steps; until then it has no row."""
        if slots:
            sequence.is_arriving = True
            self._arriving[sequence] = deque(zip(slots, blocks, strict=True))

    def cancel(self, sequence: Sequence) -> None:
        """Its blocks are given up."""
        for slot, _block in self._arriving.pop(sequence, ()):
            self.host.unpin(slot)
        sequence.is_arriving = False

    def note_resumed(self, num_copied: int, num_computed: int) -> None:
        """A sequence that had given up its blocks has some again: so many were copied, so many are to be computed."""
        self.resumed["swap" if num_copied else "recompute" if num_computed else "kept"] += 1

    # ---- a step

    @property
    def has_loads(self) -> bool:
        return bool(self._arriving)

    def poll(self, now: float) -> bool:
        """Before a step. True: some that wait for the disk need not any more."""
        has_news = self.disk is not None and self.disk.poll(now)
        while self._patience and self._patience[0] <= now:
            self._patience.popleft()
            has_news = True
        return has_news

    def take(self) -> tuple[Copies, Copies]:
        """What the next step has to copy: (block, slot) to the host, then (slot, block) back."""
        loads: list[tuple[int, int]] = []
        self._issued_loads = []
        num_left = self.cost.max_loads if self._arriving else 0
        for sequence, pending in self._arriving.items():
            while pending and len(loads) < num_left:
                loads.append(pending.popleft())
                self._issued_loads.append((sequence, loads[-1][0]))
        self._issued_stores, self._stores = self._stores, {}
        return tuple((block, slot) for slot, (block, _key) in self._issued_stores.items()), tuple(loads)

    def settle(self) -> None:
        """The step has run: what it was to copy is copied."""
        self.num_stores += len(self._issued_stores)
        self.num_loads += len(self._issued_loads)
        for slot, (_block, key) in self._issued_stores.items():
            if self.disk is not None and self.host.find(key) == slot:  # else it was forgotten meanwhile
                self.disk.write(key, slot)
            self.host.unpin(slot)
        for sequence, slot in reversed(self._issued_loads):  # a prefix is forgotten from its end
            self.host.unpin(slot)
            if self._arriving.get(sequence) == deque():
                self.cancel(sequence)
        self._issued_stores, self._issued_loads = {}, []

    @property
    def owners(self) -> set[bytes]:
        """Whose blocks a former run left on the disk."""
        return self.disk.index.owners if self.disk is not None else set()

    def forget(self, owners: Collection[bytes]) -> None:
        """The blocks of these owners are on no tier any more; copies under way come to their end."""
        self.host.forget(owners)
        if self.disk is not None:
            self.disk.forget(owners)

    def close(self) -> None:
        """Ends the disk's threads."""
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        """Asserts every invariant. For tests."""
        num_pins = len(self._stores) + len(self._issued_stores) + len(self._issued_loads)
        num_pins += sum(map(len, self._arriving.values())) + (self.disk.num_pins if self.disk else 0)
        self.host.check(num_pins)
        if self.disk is not None:
            self.disk.index.check()
        assert all(one.is_arriving and pending for one, pending in self._arriving.items())

    # ---- what is worth it

    @property
    def _is_worth_it(self) -> bool:
        return self._policy == "on" or self.cost.prefers_copy

    def _may_restore(self, sequence: Sequence) -> bool:
        return self._is_worth_it and not (self._policy == "off" and sequence.num_preempted)


def no_tiers(pool: BlockPool) -> KVTiers:
    """Blocks that leave the device are gone."""
    return KVTiers(pool, HostPool(0), CostModel(1, pool.block_size, copy_speed=1.0, compute_speed=1.0))
