"""From stored files to one packed host buffer in the layout that the engine copies as it is. Knows no device.

An adapter is one 1-D buffer and a directory. Only what is present is stored, at its true rank, with the scale folded
into B. What the engine computes from it, for the rows of its requests only:

    linears, lm_head, embed_tokens   y = g ∘ (W·x + b + B·(A·x)) + c     (x of embed_tokens is one-hot)
    norms, or whole tables           W is replaced
    single tokens                    rows of W are replaced

g is DoRA's magnitude / ‖W + B·A‖ (arXiv 2402.09353), c holds trained biases less what the base adds already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from adapters.base_copies import check_copies
from adapters.header import Tensor, open_regular
from adapters.numbers import STORED, Array, cast, read, widen
from adapters.spec import (
    LINEARS,
    MODULES,
    AdapterInvalid,
    AdapterSpec,
    BaseShape,
    ModuleSpec,
    aligned,
    extents,
    packed_elements,
)
from adapters.storage import WEIGHTS_FILE, content_digest
from adapters.validation import Inspected, Limits, check_content, inspect

UNIT = 16
"""Offsets in the directory count units of this many elements; every part begins at a multiple of it."""

OFFSET_A, OFFSET_B, RANK, FLAGS, OFFSET_BIAS, OFFSET_G = range(6)
"""Columns of the directory. RANK 0 = no A and B; FLAGS 0 besides = the adapter lacks this module. Offsets of what is
not there are 0 and mean nothing."""

HAS_G, HAS_BIAS, IS_WHOLE, HAS_TOKENS = 1, 2, 4, 8
"""FLAGS: g [out] is at OFFSET_G; c [out] is at OFFSET_BIAS; the whole weight is at OFFSET_A; RANK rows of tokens are at
OFFSET_A, their ids, ascending, at OFFSET_B."""

NUM_FIELDS = 6

_COLUMNS = {
    "a": (OFFSET_A, 0), "b": (OFFSET_B, 0), "weight": (OFFSET_A, IS_WHOLE), "tokens": (OFFSET_A, HAS_TOKENS),
    "token_ids": (OFFSET_B, HAS_TOKENS), "gain": (OFFSET_G, HAS_G), "shift": (OFFSET_BIAS, HAS_BIAS),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter in host memory.

    buffer      [N], of the engine's dtype; N is a multiple of UNIT. On the CPU, contiguous. Of linears, A is [r, in]
                and B [r, out]; of lm_head, A is [r, in] and B [out, r]; of embed_tokens, A is [vocabulary, r] and B
                [out, r]. Whole tables and rows are of this dtype too; g, c and norms are fp32, ids are int64
    directory   int64 [num_layers + 1, len(MODULES), NUM_FIELDS]; offsets in UNITs from the start of `buffer`. The last
                row is of what belongs to no layer
    size_bytes  of the buffer
    rank        the largest of its modules
    """

    buffer: torch.Tensor
    directory: torch.Tensor
    size_bytes: int
    rank: int


class BaseWeights(Protocol):
    """What some adapters need to know of the base's weights. Called in the threads that load adapters."""

    def bias(self, layer: int, module: str) -> Array | None:
        """[out] fp32; None where there is none."""
        ...

    def squared_norms(self, layer: int, module: str, a_RI: Array, b_OR: Array) -> Array:
        """[out]: ‖W[o] + (B·A)[o]‖² for each output, with W [out, in]."""
        ...


def load(
    path: Path,
    shape: BaseShape,
    dtype: torch.dtype,
    max_rank: int,
    digest: str | None = None,
    base: BaseWeights | None = None,
) -> PackedAdapter:
    """Reads, checks and packs the adapter in `path`. With `digest`, its bytes must still be what was committed.

    Casts and copies are numpy's: they release the interpreter's lock and stay out of torch's thread pool. `base` is
    asked only for adapters with DoRA or trained biases.
    Raises AdapterError (AdapterInvalid for damaged files), OSError for what may pass when tried again.
    """
    if digest is not None and content_digest(path) != digest:
        raise AdapterInvalid("adapter_damaged", "the stored files are no longer what was uploaded")
    with open_regular(path / WEIGHTS_FILE) as file:
        found = inspect(path, file, shape, Limits(max_rank=max_rank, max_bytes=sys.maxsize))
        if digest is None:
            check_content(file, found, shape)
        else:
            check_copies(file, found.copies, shape)
        return _pack(file, found, shape, dtype, base)


def _pack(
    file: FileIO, found: Inspected, shape: BaseShape, dtype: torch.dtype, base: BaseWeights | None
) -> PackedAdapter:
    spec: AdapterSpec = found.spec
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    buffer = np.zeros(packed_elements(spec.modules, shape, dtype.itemsize), STORED[kind])
    directory = np.zeros((shape.num_layers + 1, len(MODULES), NUM_FIELDS), np.int64)
    position = 0
    for module in spec.modules:
        row = directory[module.layer, MODULES.index(module.module)]
        row[RANK] = module.rank or len(module.token_ids)
        parts = _Parts(file, found.tensors, module, shape, base)
        for part, count in extents(module, shape, dtype.itemsize):
            column, flag = _COLUMNS[part]
            row[column] = position // UNIT
            row[FLAGS] |= flag
            buffer[position : position + count] = parts.get(part, kind).reshape(-1).view(buffer.dtype)
            position += aligned(count)
    packed = torch.from_numpy(buffer).view(dtype)
    return PackedAdapter(packed, torch.from_numpy(directory), buffer.nbytes, spec.rank)


class _Parts:
    """The parts of one module, read and computed when they are asked for."""

    def __init__(
        self,
        file: FileIO,
        tensors: Mapping[str, Tensor],
        module: ModuleSpec,
        shape: BaseShape,
        base: BaseWeights | None,
    ) -> None:
        self._file = file
        self._tensors = tensors
        self._module = module
        self._rows = slice(module.first_row, module.first_row + shape.size(module.module)[0])
        self._base = base
        self._gain: Array | None = None

    def get(self, part: str, kind: str) -> Array:
        module = self._module
        if part == "a":
            a = self._cast(module.tensor_a, kind)
            return np.ascontiguousarray(a.T) if module.module == "embed_tokens" else a
        if part == "b":
            b = self._cast(module.tensor_b, kind, module.scale)[self._rows]
            return np.ascontiguousarray(b.T) if module.module in LINEARS else b
        if part == "weight":
            weight = self._cast(module.weight, kind)
            return self._wide(module.weight) if weight.ndim == 1 else weight
        if part == "tokens":
            return self._cast(module.tokens, kind)[np.argsort(module.token_ids)]
        if part == "token_ids":
            return np.sort(np.array(module.token_ids, np.int64))
        return self._gains() if part == "gain" else self._shifts()

    def _gains(self) -> Array:
        """Magnitude / ‖W + scale·B·A‖, computed once."""
        if self._gain is None:
            module = self._module
            a, b = self._wide(module.tensor_a), self._wide(module.tensor_b)[self._rows]
            squares = self._of_base().squared_norms(module.layer, module.module, a, b * np.float32(module.scale))
            with np.errstate(divide="ignore", invalid="ignore"):
                gain = self._wide(module.magnitude)[self._rows] / np.sqrt(np.maximum(squares, 0))
            if not np.isfinite(gain).all():
                raise AdapterInvalid("values_not_finite", "the magnitude belongs to a row of zeros", module.magnitude)
            self._gain = gain.astype("<f4")
        return self._gain

    def _shifts(self) -> Array:
        """What is left to add after g ∘ (W·x + b + B·A·x): the trained bias in the place of g∘b, and B's own bias."""
        module = self._module
        gain = self._gains() if module.magnitude else np.float32(1)
        shift = np.zeros(self._rows.stop - self._rows.start, np.float32)
        base = self._of_base().bias(module.layer, module.module) if module.bias or module.magnitude else None
        if base is not None:
            shift += (self._wide(module.bias)[self._rows] if module.bias else base) - gain * base
        if module.lora_bias:
            shift += self._wide(module.lora_bias)[self._rows] * np.float32(module.scale)
        return shift

    def _of_base(self) -> BaseWeights:
        if self._base is None:
            raise ValueError("this adapter can't be packed without the base's weights")
        return self._base

    def _cast(self, name: str, kind: str, scale: float = 1.0) -> Array:
        tensor = self._tensors[name]
        return cast(read(self._file, tensor), tensor.dtype, kind, scale)

    def _wide(self, name: str) -> Array:
        tensor = self._tensors[name]
        return widen(read(self._file, tensor), tensor.dtype)
