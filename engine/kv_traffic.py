"""DiskTraffic: which KV blocks go to the disk and which are read from it, and what has become of that. Knows no files.

A slot of the host stays pinned as long as the disk copies from or to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.block_pool import is_ephemeral, owner_in
from engine.cost_model import CostModel
from engine.kv_disk_index import DiskIndex
from engine.kv_host_pool import HostPool

MAX_WRITES = 64
"""Blocks on their way to the disk at a time; others wait for as long as the host keeps them."""
WRITE_PAUSE_S = 30.0
"""A disk that failed to write is left alone for so long."""
TRIAL_EVERY = 32
"""Of reads that do not pay one in so many is begun, for one block: a disk that was busy is found out when it no longer
is."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A read or write of one block that has come to its end."""

    key: bytes
    slot: int
    is_read: bool
    is_ok: bool
    seconds: float = 0.0


class Disk(Protocol):
    """Files of blocks; returns at once, and tells later what has become of it. Slots are of the host memory."""

    block_bytes: int

    def write(self, key: bytes, slot: int) -> None: ...

    def read(self, key: bytes, slot: int) -> None: ...

    def remove(self, key: bytes) -> None:
        """Comes after every write that was asked for before."""
        ...

    def poll(self) -> list[Transfer]: ...

    def close(self) -> None: ...


class DiskTraffic:
    """num_hits, num_writes, num_faults   blocks read, written, and neither, ever
    always                                also where the cost model says that it does not pay
    """

    def __init__(self, disk: Disk, index: DiskIndex, host: HostPool, cost: CostModel, always: bool) -> None:
        self.index = index
        self.num_hits = 0
        self.num_writes = 0
        self.num_faults = 0
        self._disk = disk
        self._host = host
        self._cost = cost
        self._always = always
        self._reading: dict[bytes, int] = {}
        self._unwanted: set[bytes] = set()  # of those being read
        self._num_writing = 0
        self._backlog: deque[bytes] = deque(maxlen=host.num_slots)
        self._max_writes = max(1, min(MAX_WRITES, host.num_slots // 4))
        self._max_reads = max(1, host.num_slots // 2)
        self._no_writes_before = 0.0
        self._num_refused = 0
        self._now = 0.0
        for key in index.trim():
            disk.remove(key)

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    @property
    def num_pins(self) -> int:
        return len(self._reading) + self._num_writing

    def write(self, key: bytes, slot: int) -> None:
        """The host has got this block: it is written, now or when others are, unless it may not be."""
        if is_ephemeral(key) or self._now < self._no_writes_before or not self._pays(MAX_WRITES):
            return
        if self._num_writing < self._max_writes:
            self._begin_write(key, slot)
        else:
            self._backlog.append(key)

    def read(self, keys: Sequence[bytes]) -> bool:
        """Begins to read those of the leading run that are on the disk alone, as far as half of the host holds them, if
        that pays. False: none is on its way."""
        run = list(self._run(keys))
        for key in reversed(run):  # a prefix is forgotten from its end
            if self._host.find(key) is None and key in self.index:
                self.index.touch(key)
        wanted = [key for key in run if key not in self._host]
        if wanted and not self.awaits(wanted) and not self._pays(len(wanted)):
            self._num_refused += 1
            wanted = wanted[:1] if self._num_refused % TRIAL_EVERY == 0 else []
        for key in wanted:
            if key in self._reading:
                continue
            slot = self._host.take() if len(self._reading) < self._max_reads else None
            if slot is None:
                break
            self._reading[key] = slot
            self._disk.read(key, slot)
        return self.awaits(wanted)

    def awaits(self, keys: Sequence[bytes]) -> bool:
        """One of them is being read."""
        return any(key in self._reading for key in keys)

    def forget(self, owners: Collection[bytes]) -> None:
        """The blocks of these owners go from the disk, also those on their way to it or from it."""
        for key in self.index.forget(owners):
            self._disk.remove(key)
        self._unwanted.update(key for key in self._reading if owner_in(key) in owners)

    def poll(self, now: float) -> bool:
        """Takes up what the disk has done. True: blocks have come to the host, or will not."""
        self._now = now
        has_news = False
        for done in self._disk.poll():
            if done.is_read:
                has_news = True
                self._take_read(done)
            else:
                self._take_written(done)
            self._host.unpin(done.slot)
        return has_news

    def close(self) -> None:
        self._disk.close()

    def _begin_write(self, key: bytes, slot: int) -> None:
        gone = self.index.promise(key, self._disk.block_bytes)
        if gone is None:
            return
        for other in gone:
            self._disk.remove(other)
        self._num_writing += 1
        self._host.pin(slot)
        self._disk.write(key, slot)

    def _run(self, keys: Sequence[bytes]) -> Iterator[bytes]:
        """The leading keys that are known to host or disk."""
        for key in keys:
            if key not in self._host and key not in self._reading and key not in self.index:
                return
            yield key

    def _take_read(self, done: Transfer) -> None:
        del self._reading[done.key]
        if done.key in self._unwanted:
            self._unwanted.discard(done.key)
            return
        if not done.is_ok:
            self.num_faults += 1
            self.index.drop(done.key)
            return
        self.num_hits += 1
        self._cost.note_disk(self._disk.block_bytes, done.seconds)
        if done.key not in self._host:
            self._host.know(done.slot, done.key)

    def _take_written(self, done: Transfer) -> None:
        self._num_writing -= 1
        if done.is_ok:
            self.num_writes += 1
            self.index.keep(done.key)
        else:
            self.num_faults += 1
            self.index.drop(done.key)
            self._no_writes_before = self._now + WRITE_PAUSE_S
            self._backlog.clear()
        while self._backlog and self._num_writing < self._max_writes:
            key = self._backlog.popleft()
            slot = self._host.find(key)
            if slot is not None:
                self._begin_write(key, slot)

    def _pays(self, num_blocks: int) -> bool:
        return num_blocks > 0 and (self._always or self._cost.prefers_disk(num_blocks))
