"""From stored files to one packed host buffer in the layout that the engine copies as it is. Knows no device.

An adapter is one 1-D buffer and a directory. Only what is present is stored, at its true rank: A as [r, in] and B as
[r, out] (transposed), with the scale folded into B.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.spec import BaseShape

if TYPE_CHECKING:
    import torch

UNIT = 16
"""Offsets in the directory count units of this many elements; every tensor begins at a multiple of it."""

OFFSET_A, OFFSET_B, RANK, FLAGS, OFFSET_BIAS, OFFSET_G = range(6)
"""Columns of the directory. RANK 0 = the adapter lacks this module (offsets are then 0 and mean nothing)."""

NUM_FIELDS = 6


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter in host memory.

    buffer      [N], of the engine's dtype; N is a multiple of UNIT. On the CPU, contiguous
    directory   int64 [num_layers, len(LINEARS), NUM_FIELDS]; offsets in UNITs from the start of `buffer`
    size_bytes  of the buffer
    rank        the largest of its modules
    """

    buffer: torch.Tensor
    directory: torch.Tensor
    size_bytes: int
    rank: int


def load(path: Path, shape: BaseShape, dtype: torch.dtype, max_rank: int, digest: str | None = None) -> PackedAdapter:
    """Reads, checks and packs the adapter in `path`. With `digest`, its bytes must still be what was committed.

    Raises AdapterError (AdapterInvalid for damaged files), OSError for what may pass when tried again.
    """
    raise NotImplementedError
