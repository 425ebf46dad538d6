"""From stored files to one packed host buffer in the layout that the engine copies as it is. Knows no device.

An adapter is one 1-D buffer and a directory. Only what is present is stored, at its true rank: A as [r, in] and B as
[r, out] (transposed), with the scale folded into B.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adapters.header import Tensor, open_regular
from adapters.spec import LINEARS, AdapterInvalid, AdapterSpec, BaseShape, aligned, packed_elements
from adapters.storage import WEIGHTS_FILE, content_digest
from adapters.validation import Inspected, Limits, inspect
from adapters.values import check_values, read_into

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

    Casts and copies are numpy's: they release the interpreter's lock and stay out of torch's thread pool.
    Raises AdapterError (AdapterInvalid for damaged files), OSError for what may pass when tried again.
    """
    if digest is not None and content_digest(path) != digest:
        raise AdapterInvalid("adapter_damaged", "the stored files are no longer what was uploaded")
    with open_regular(path / WEIGHTS_FILE) as file:
        found = inspect(path, file, shape, Limits(max_rank=max_rank, max_bytes=sys.maxsize))
        if digest is None:
            check_values(file, found.tensors, {module.tensor_b: module.scale for module in found.spec.modules})
        return _pack(file, found, shape, dtype)


def _pack(file: FileIO, found: Inspected, shape: BaseShape, dtype: torch.dtype) -> PackedAdapter:
    spec: AdapterSpec = found.spec
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    buffer = np.zeros(packed_elements(spec.modules, shape), _STORED[kind])
    directory = np.zeros((shape.num_layers, len(LINEARS), NUM_FIELDS), np.int64)
    position = 0
    for module in spec.modules:
        row = directory[module.layer, LINEARS.index(module.module)]
        row[RANK] = module.rank
        for column, name, scale in ((OFFSET_A, module.tensor_a, 1.0), (OFFSET_B, module.tensor_b, module.scale)):
            matrix = _cast(_read(file, found.tensors[name]), found.tensors[name].dtype, kind, scale)
            if column == OFFSET_B:
                matrix = matrix.T
            row[column] = position // UNIT
            buffer[position : position + matrix.size].reshape(matrix.shape)[...] = matrix
            position += aligned(matrix.size)
    packed = torch.from_numpy(buffer).view(dtype)
    return PackedAdapter(packed, torch.from_numpy(directory), buffer.nbytes, spec.rank)


_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""numpy has no bfloat16: its bits travel as integers."""


def _read(file: FileIO, tensor: Tensor) -> npt.NDArray[Any]:
    raw = np.empty(tensor.end - tensor.begin, np.uint8)
    file.seek(tensor.begin)
    read_into(file, raw.data, tensor)
    return raw.view(_STORED[tensor.dtype]).reshape(tensor.shape)


def _cast(matrix: npt.NDArray[Any], source: str, target: str, scale: float) -> npt.NDArray[Any]:
    """matrix · scale in the target's representation: computed in fp32, rounded once, to nearest even."""
    if source == target and scale == 1.0:
        return matrix
    wide = (matrix.astype("<u4") << np.uint32(16)).view("<f4") if source == "BF16" else matrix.astype("<f4", copy=False)
    if scale != 1.0:
        wide = wide * np.float32(scale)
    if target == "BF16":
        bits = wide.view("<u4")
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    return wide.astype(_STORED[target], copy=False)
