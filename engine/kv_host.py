"""HostMemory: the bytes of KV blocks on the host, and their copies from and to the device. Knows no keys.

A block travels as it lies in the KV cache, in whatever order the ops keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.kv_cache import KVCache, zeros

Pairs = Iterable[tuple[int, int]]


class HostMemory:
    """`slots_SL2C` is [num_slots, layers, 2, elements of a block's keys or values]; pinned where there is a device.

    note_copy   told (bytes, seconds) of every copy
    """

    def __init__(self, cache: KVCache, num_slots: int, note_copy: Callable[[int, float], None]) -> None:
        layer = cache.layers[0]
        self.num_slots = num_slots
        self.num_blocks = cache.num_blocks
        self._cache = cache
        self._device = layer.device
        self._note_copy = note_copy
        shape = (num_slots, len(cache.layers), 2, layer[0].numel() // cache.num_blocks)
        self.slots_SL2C = (
            torch.zeros(shape, dtype=layer.dtype, pin_memory=True)
            if self._device.type == "cuda"
            else zeros(shape, layer.dtype)
        )
        self.slot_bytes = self.slots_SL2C[0].numel() * layer.dtype.itemsize

    def view(self, slot: int) -> memoryview:
        """Its bytes, to be read and written."""
        return self.slots_SL2C[slot].view(torch.uint8).flatten().numpy().data

    def store(self, pairs: Pairs) -> None:
        """Copies (block, slot) each."""
        pairs = list(pairs)
        if not pairs:
            return
        started = time.perf_counter()
        blocks = torch.tensor([block for block, _ in pairs], device=self._device)
        layers = [self._blocks_of(layer)[:, blocks] for layer in self._cache.layers]  # [2, N, C] each
        staged_NL2C = torch.stack(layers).permute(2, 0, 1, 3).contiguous()
        for staged, (_, slot) in zip(staged_NL2C, pairs, strict=True):
            self.slots_SL2C[slot].copy_(staged, non_blocking=True)
        self._finish(len(pairs), started)

    def load(self, pairs: Pairs) -> None:
        """Copies (slot, block) each."""
        pairs = list(pairs)
        if not pairs:
            return
        started = time.perf_counter()
        blocks = torch.tensor([block for _, block in pairs], device=self._device)
        staged_NL2C = self.slots_SL2C.new_empty((len(pairs), *self.slots_SL2C.shape[1:]), device=self._device)
        for staged, (slot, _) in zip(staged_NL2C, pairs, strict=True):
            staged.copy_(self.slots_SL2C[slot], non_blocking=True)
        for index, layer in enumerate(self._cache.layers):
            self._blocks_of(layer)[:, blocks] = staged_NL2C[:, index].transpose(0, 1)
        self._finish(len(pairs), started)

    def _blocks_of(self, layer: Tensor) -> Tensor:
        return layer.view(2, self.num_blocks, -1)

    def _finish(self, num_blocks: int, started: float) -> None:
        """The device has nothing else to do at this time; afterwards the slots may be used by any thread."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._note_copy(num_blocks * self.slot_bytes, time.perf_counter() - started)
