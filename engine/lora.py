"""LoraBank: device memory of adapters at their true rank. Knows digests and slots, no names and no policy: what may
be placed or evicted is decided by adapters.residency."""

from __future__ import annotations

import heapq
from dataclasses import replace

import torch
from torch import Tensor

from adapters.loader import PackedAdapter
from adapters.spec import BaseShape
from engine.adapter_view import AdapterView, Extras, LoraPart, Table


class LoraBank:
    """Adapters by slot: a small number that stands for a placed adapter until it is evicted; the lowest free one is
    taken. An adapter is one contiguous buffer at its true rank and a directory of offsets.

    On a card, the buffers are extents of one arena of `budget_bytes`, and placing is one copy. On the CPU, host and
    device are one tier: placing keeps the host's own buffer, and costs no copy.
    Placing and evicting happen between steps, never while a batch that was built before is still to run.
    """

    def __init__(
        self,
        shape: BaseShape,
        budget_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        has_arena: bool | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._shape = shape
        self._dtype = dtype
        if has_arena is None:
            has_arena = torch.device(device).type != "cpu"
        self._arena = Arena(budget_bytes // dtype.itemsize, dtype, device) if has_arena else None
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._device = device
        self._hosts: dict[int, PackedAdapter] = {}  # with an arena, their buffers are views of it
        self._directories: dict[int, Tensor] = {}  # with an arena, on its device: kernels read them
        self._tables: dict[int, Table] = {}  # of those that somebody has asked for where they lie now
        self._extras: dict[int, Extras] = {}

    @property
    def num_layers(self) -> int:
        """Of the base: which row of a directory is of what belongs to no layer."""
        return self._shape.num_layers

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    def place(self, digest: str, host: PackedAdapter) -> None:
        """Takes the adapter in. The caller has made sure that it fits the budget."""
        assert digest not in self._slots, "placed twice"
        assert host.buffer.dtype == self._dtype, "an adapter loaded as another dtype than the bank's"
        assert self.used_bytes + host.size_bytes <= self.budget_bytes, "adapter memory overcommitted"
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._hosts)
        self._slots[digest] = slot
        self._hosts[slot] = host
        self.used_bytes += host.size_bytes
        if self._arena is not None:
            moved = self._arena.take(slot, host.buffer.numel())
            self._directories[slot] = host.directory.to(self._device)
            self._arena.view(slot).copy_(host.buffer)
            for each in {slot, *moved}:
                self._hosts[each] = replace(self._hosts[each], buffer=self._arena.view(each))
                self._look(each)
        else:
            self._look(slot)

    def evict(self, digest: str) -> None:
        """Frees the adapter's memory and slot."""
        slot = self._slots.pop(digest)
        self.used_bytes -= self._hosts.pop(slot).size_bytes
        self._tables.pop(slot, None)
        self._extras.pop(slot, None)
        self._directories.pop(slot, None)
        if self._arena is not None:
            self._arena.free(slot)
        heapq.heappush(self._free_slots, slot)

    def read(self, digest: str) -> PackedAdapter:
        """A placed adapter in host memory, equal to what was placed; stays whole when the adapter is evicted."""
        host = self._hosts[self._slots[digest]]
        return host if self._arena is None else replace(host, buffer=host.buffer.to("cpu", copy=True))

    def slot(self, digest: str) -> int:
        """The slot of a placed adapter; KeyError if it isn't."""
        return self._slots[digest]

    def placed(self, slot: int) -> PackedAdapter:
        """The adapter in `slot` where it lies now: its addresses are good until the next place() or evict()."""
        host = self._hosts[slot]
        return replace(host, directory=self._directories[slot]) if slot in self._directories else host

    def pair(self, slot: int, layer: int, module: int) -> LoraPart | None:
        """What the adapter in `slot` does to one linear, None where it lacks it."""
        table = self._tables.get(slot)
        if table is None:
            table = self._tables[slot] = AdapterView(self._hosts[slot], self._shape).table()
        return table[layer][module]

    def extras(self, slot: int) -> Extras | None:
        """What the adapter in `slot` changes outside the linears; of most adapters, None."""
        return self._extras.get(slot)

    def _look(self, slot: int) -> None:
        """Makes the views of an adapter where it lies now; those of its linears when they are asked for."""
        self._tables.pop(slot, None)
        extras = AdapterView(self._hosts[slot], self._shape).extras()
        if extras is not None:
            self._extras[slot] = extras


class Arena:
    """One tensor divided into contiguous extents, each with a key; first fit, compacted where free elements are
    scattered."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._memory = torch.empty(size, dtype=dtype, device=device)
        self._extents: dict[int, tuple[int, int]] = {}  # key → (first element, number of elements)

    def take(self, key: int, size: int) -> list[int]:
        """Reserves `size` elements for `key`; they fit. Returns the keys whose extents moved to make room."""
        start = self._find(size)
        moved: list[int] = []
        if start is None:
            start, moved = self._compact()
        assert start + size <= self._memory.numel(), "arena overcommitted"
        self._extents[key] = (start, size)
        return moved

    def free(self, key: int) -> None:
        del self._extents[key]

    def view(self, key: int) -> Tensor:
        start, size = self._extents[key]
        return self._memory[start : start + size]

    def _find(self, size: int) -> int | None:
        """First gap that is large enough."""
        end = 0
        for start, length in sorted(self._extents.values()):
            if start - end >= size:
                return end
            end = start + length
        return end if self._memory.numel() - end >= size else None

    def _compact(self) -> tuple[int, list[int]]:
        """Moves all extents to the front, in order. Returns the end of the last, and which moved."""
        end = 0
        moved = []
        for key, (start, size) in sorted(self._extents.items(), key=lambda item: item[1]):
            if start != end:
                source = self._memory[start : start + size]
                self._memory[end : end + size] = source.clone() if end + size > start else source
                self._extents[key] = (end, size)
                moved.append(key)
            end += size
        return end, moved
