"""Room: memory for what operations compute, used again. The system gives new memory by the page, zeroed: of the time of
a long prompt that was a tenth. Knows no operation."""

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


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size * 4 + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size * 4].view(np.float32)
