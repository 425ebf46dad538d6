"""Memory of operations: Room for what they compute, used again (the system gives new memory by the page, zeroed: of the
time of a long prompt that was a tenth), Shelf for what stays. Knows no operation."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64


class Room:
    """For one thread. It holds as many pieces of memory as were in use at once, as large as they had to be.
    With `keeps` no piece is ever given back, so that what is written down of addresses stays true; its sizes are powers
    of two then, so that batches of ever new sizes share them."""

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._memory: list[np.ndarray] = []
        self._free: list[int] = []

    def empty(self, *shape: int) -> Tensor:
        """As torch.empty. What it holds is used again once nothing can see it any more, and as warm in the cache."""
        size = math.prod(shape)
        index = self._find(size)
        view = self._memory[index][:size]
        at_end = weakref.finalize(view, self._free.append, index)  # the tensor's storage and all its views hold it
        at_end.atexit = False
        return torch.from_numpy(view).view(shape)

    def _find(self, size: int) -> int:
        """Of the free pieces with so many elements the smallest; else a new one, in place of one that is too small."""
        if self._free:
            index = min(self._free, key=lambda each: (len(self._memory[each]) < size, len(self._memory[each])))
            if len(self._memory[index]) >= size:
                self._free.remove(index)
                return index
            if not self._keeps:
                self._free.remove(index)
                self._memory[index] = _aligned(size)
                return index
        self._memory.append(_aligned(1 << (size - 1).bit_length() if self._keeps else size))
        return len(self._memory) - 1


class Shelf:
    """Pieces that stay, side by side in large arrays: for those numpy asks the system for huge pages, and a processor
    reads ahead in them for longer."""

    CHUNK_BYTES = 64 << 20

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._start = 0

    def empty(self, num_bytes: int) -> Tensor:
        """Bytes that begin with a line of the cache. They live as long as something sees their array."""
        self._start += -(self._chunk.ctypes.data + self._start) % ALIGNMENT
        if self._start + num_bytes > len(self._chunk):
            self._chunk = np.empty(max(self.CHUNK_BYTES, num_bytes + ALIGNMENT), np.uint8)
            self._start = -self._chunk.ctypes.data % ALIGNMENT
        piece = self._chunk[self._start : self._start + num_bytes]
        self._start += num_bytes
        return torch.from_numpy(piece)


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size * 4 + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size * 4].view(np.float32)
