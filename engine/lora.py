"""LoraBank: device memory of adapters at their true rank. Knows digests and slots, no names and no policy: what may
be placed or evicted is decided by adapters.residency."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.loader import FLAGS, OFFSET_A, OFFSET_B, RANK, UNIT, PackedAdapter
from adapters.spec import LINEARS, BaseShape

LoraPair = tuple[Tensor, Tensor]
"""Aᵀ [H, R] and B [R, O] of one linear, views of the arena. Scale is folded into B."""

Table = tuple[tuple[LoraPair | None, ...], ...]
"""[layer][module] → pair, None where the adapter lacks it."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where a placed adapter lies now, until the next place() or evict().

    arena_ptr   address of the first element of its extent
    directory   int64 [layers, modules, fields] (see adapters.loader); offsets count from arena_ptr
    """

    arena_ptr: int
    directory: Tensor
    rank: int


class LoraBank:
    """One arena; an adapter is one contiguous extent of it, at its true rank, and a directory of offsets.

    A slot is a small number that stands for a placed adapter until it is evicted; the lowest free one is taken.
    Placing and evicting happen between steps, never while a batch that was built before is still to run.
    """

    def __init__(
        self, shape: BaseShape, budget_bytes: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.budget_bytes = budget_bytes
        self._shape = shape
        self._arena = torch.empty(budget_bytes // dtype.itemsize // UNIT * UNIT, dtype=dtype, device=device)
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._extents: dict[int, tuple[int, int]] = {}  # slot → (first element, number of elements)
        self._directories: dict[int, Tensor] = {}
        self._tables: dict[int, Table] = {}

    @property
    def used_bytes(self) -> int:
        return sum(size for _, size in self._extents.values()) * self._arena.itemsize

    def place(self, digest: str, host: PackedAdapter) -> None:
        """Copies the adapter into the arena, compacting it first if the free bytes are scattered. The caller has made
        sure that it fits."""
        assert digest not in self._slots, "placed twice"
        size = -(-host.buffer.numel() // UNIT) * UNIT
        start = self._find(size)
        if start is None:
            start = self._compact()
            assert start + size <= self._arena.numel(), "adapter memory overcommitted"
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._extents)
        self._arena[start : start + host.buffer.numel()].copy_(host.buffer)
        self._slots[digest] = slot
        self._extents[slot] = (start, size)
        self._directories[slot] = host.directory.contiguous()
        self._tables[slot] = self._table(slot)

    def evict(self, digest: str) -> None:
        """Frees the adapter's extent and slot."""
        slot = self._slots.pop(digest)
        del self._extents[slot], self._directories[slot], self._tables[slot]
        heapq.heappush(self._free_slots, slot)

    def read(self, digest: str) -> PackedAdapter:
        """A copy of a placed adapter in host memory, equal to what was placed."""
        slot = self._slots[digest]
        start, size = self._extents[slot]
        buffer = self._arena[start : start + size].to("cpu", copy=True)
        directory = self._directories[slot]
        return PackedAdapter(buffer, directory, buffer.nbytes, int(directory[:, :, RANK].max()))

    def slot(self, digest: str) -> int:
        """The slot of a placed adapter; KeyError if it isn't."""
        return self._slots[digest]

    def placed(self, slot: int) -> Placed:
        """Addresses of the adapter in `slot`, for ops that work on memory."""
        start, _ = self._extents[slot]
        directory = self._directories[slot]
        address = self._arena.data_ptr() + start * self._arena.itemsize
        return Placed(address, directory, int(directory[:, :, RANK].max()))

    def pair(self, slot: int, layer: int, module: int) -> LoraPair | None:
        """A and B of one linear of the adapter in `slot`, None where it lacks it."""
        return self._tables[slot][layer][module]

    def _find(self, size: int) -> int | None:
        """First gap that is large enough."""
        end = 0
        for start, length in sorted(self._extents.values()):
            if start - end >= size:
                return end
            end = start + length
        return end if self._arena.numel() - end >= size else None

    def _compact(self) -> int:
        """Moves all extents to the front, in order; returns the end of the last."""
        end = 0
        for slot, (start, size) in sorted(self._extents.items(), key=lambda item: item[1]):
            if start != end:
                source = self._arena[start : start + size]
                self._arena[end : end + size] = source.clone() if end + size > start else source
                self._extents[slot] = (end, size)
                self._tables[slot] = self._table(slot)
            end += size
        return end

    def _table(self, slot: int) -> Table:
        return tuple(
            tuple(self._view(slot, fields, name) for fields, name in zip(modules, LINEARS, strict=True))
            for modules in self._directories[slot].tolist()
        )

    def _view(self, slot: int, fields: list[int], name: str) -> LoraPair | None:
        assert fields[FLAGS] == 0, "an adapter with parts that this bank does not know"
        rank = fields[RANK]
        if rank == 0:
            return None
        outputs, inputs = self._shape.linears[name]
        base = self._extents[slot][0]
        a_start, b_start = base + fields[OFFSET_A] * UNIT, base + fields[OFFSET_B] * UNIT
        a = self._arena[a_start : a_start + rank * inputs].view(rank, inputs)
        return a.t(), self._arena[b_start : b_start + rank * outputs].view(rank, outputs)
