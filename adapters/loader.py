"""From stored files to one packed host buffer in the layout that the engine copies as it is. Knows no device.

An adapter is one 1-D buffer and a directory. Only what is present is stored, at its true rank, with the scale folded
into B. What the engine computes from it, for the rows of its requests only:

    linears, lm_head, embed_tokens   y = g ∘ (W·x + b + B·(A·x)) + c     (x of embed_tokens is one-hot)
    norms, or whole tables           W is replaced
    single tokens                    rows of W are replaced
    new tokens                       W has more rows

g is DoRA's magnitude / ‖W + B·A‖ (arXiv 2402.09353), c holds trained biases less what the base adds already.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import FileIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from adapters.base_copies import check_copies
from adapters.blueprint import Blueprint, Blueprints
from adapters.header import Tensor, open_regular
from adapters.numbers import STORED, aligned_zeros
from adapters.parts import BaseWeights, Parts
from adapters.spans import Move, Piece, move, pack, spans
from adapters.spec import LINEARS, MODULES, AdapterInvalid, AdapterRef, BaseShape, ModuleSpec, aligned, extents
from adapters.storage import DAMAGED, WEIGHTS_FILE, AdapterStore, has_contents
from adapters.validation import PATIENT, check_content, inspect

log = logging.getLogger(__name__)

UNIT = 16
"""Offsets in the directory count units of this many elements; every part begins at a multiple of it."""

OFFSET_A, OFFSET_B, RANK, FLAGS, OFFSET_BIAS, OFFSET_G = range(6)
"""Columns of the directory. RANK 0 = no A and B; FLAGS 0 besides = the adapter lacks this module. Offsets of what is
not there are 0 and mean nothing."""

HAS_G, HAS_BIAS, IS_WHOLE, HAS_TOKENS, HAS_ADDED = 1, 2, 4, 8, 16
"""FLAGS: g [out] is at OFFSET_G; c [out] is at OFFSET_BIAS; the whole weight is at OFFSET_A; RANK rows of tokens are at
OFFSET_A, their ids, ascending, at OFFSET_B; rows of new tokens are at OFFSET_G (never together with g)."""

NUM_FIELDS = 6

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

_COLUMNS = {
    "a": (OFFSET_A, 0), "b": (OFFSET_B, 0), "weight": (OFFSET_A, IS_WHOLE), "tokens": (OFFSET_A, HAS_TOKENS),
    "token_ids": (OFFSET_B, HAS_TOKENS), "added": (OFFSET_G, HAS_ADDED), "gain": (OFFSET_G, HAS_G),
    "shift": (OFFSET_BIAS, HAS_BIAS),
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
    num_added   tokens that it adds to the vocabulary; whole tables, A of embed_tokens and B of lm_head count them, too
    """

    buffer: torch.Tensor
    directory: torch.Tensor
    size_bytes: int
    rank: int
    num_added: int = 0


def load(
    path: Path,
    shape: BaseShape,
    dtype: torch.dtype,
    max_rank: int,
    digest: str | None = None,
    base: BaseWeights | None = None,
) -> PackedAdapter:
    """A single adapter: Loader(…).load(…)."""
    return Loader(shape, dtype, max_rank, base).load(path, digest)


class Loader:
    """Reads adapters for one engine, in any number of threads.

    shape, dtype  of the base; buffers are of this dtype
    max_rank      of the engine
    base          asked only for adapters with DoRA or trained biases
    move          of A and B of linears into the buffer

    All other casts and copies are numpy's: they release the interpreter's lock and stay out of torch's thread pool.
    """

    def __init__(
        self,
        shape: BaseShape,
        dtype: torch.dtype,
        max_rank: int,
        base: BaseWeights | None = None,
        move: Move = move,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._limits = replace(PATIENT, max_rank=max_rank)
        self._base = base
        self._move = move
        self._blueprints = Blueprints(self._draw)

    def load(self, path: Path, digest: str | None = None) -> PackedAdapter:
        """Reads, checks and packs the adapter in `path`. With `digest`, its bytes must still be what was committed.

        Raises AdapterError (AdapterInvalid for damaged files), OSError for what may pass when tried again.
        """
        if digest is not None and not has_contents(path, digest):
            raise AdapterInvalid("adapter_damaged", DAMAGED)
        with open_regular(path / WEIGHTS_FILE) as file:
            blueprint = self._blueprints.get(path, file)
            if digest is None:
                check_content(file, blueprint.found, self._shape)
            else:
                check_copies(file, blueprint.found.copies, self._shape)
            return self._pack(file, blueprint)

    def load_stored(self, store: AdapterStore, ref: AdapterRef) -> PackedAdapter:
        """load() from a store. What is damaged is got anew once, if the store can. Raises AdapterError, OSError."""
        packed = self._load_stored(store, ref.digest)
        if packed.num_added != ref.num_added:  # by which ids were checked
            raise AdapterInvalid("adapter_damaged", f"it has {packed.num_added} new tokens, not {ref.num_added}")
        return packed

    def _load_stored(self, store: AdapterStore, digest: str) -> PackedAdapter:
        try:
            with store.reading(digest) as directory:
                return self.load(directory, digest)
        except AdapterInvalid as error:
            if error.code != "adapter_damaged" or not store.renew(digest):
                raise
            log.warning("adapter %s was damaged in the cache on the disk and is fetched again", digest)
        with store.reading(digest) as directory:
            return self.load(directory, digest)

    def _draw(self, path: Path, file: FileIO) -> Blueprint:
        found = inspect(path, file, self._shape, self._limits)
        shape = self._shape.grown(found.spec.num_added)
        directory = np.zeros((shape.num_layers + 1, len(MODULES), NUM_FIELDS), np.int64)
        pieces, rest, position = [], [], 0
        for module in found.spec.modules:
            row = directory[module.layer, MODULES.index(module.module)]
            row[RANK] = module.rank or len(module.token_ids)
            for part, count in extents(module, shape, self._dtype.itemsize):
                column, flag = _COLUMNS[part]
                row[column] = position // UNIT
                row[FLAGS] |= flag
                if module.module in LINEARS and part in ("a", "b"):
                    pieces.append(_piece(found.tensors, module, part, position, shape))
                else:
                    rest.append((module, part, position, count))
                position += aligned(count)
        return Blueprint(found, shape, torch.from_numpy(directory), position, spans(pieces), rest)

    def _pack(self, file: FileIO, blueprint: Blueprint) -> PackedAdapter:
        kind = _KINDS[self._dtype]
        stored = STORED[kind]
        buffer = aligned_zeros(blueprint.num_elements * stored.itemsize).view(stored)
        pack(file, blueprint.spans, buffer, kind, self._move)
        for module, group in groupby(blueprint.rest, key=itemgetter(0)):
            parts = Parts(file, blueprint.found.tensors, module, blueprint.shape, self._base)
            for _, part, start, count in group:
                buffer[start : start + count] = parts.get(part, kind).reshape(-1).view(buffer.dtype)
        spec = blueprint.found.spec
        packed = torch.from_numpy(buffer).view(self._dtype)
        return PackedAdapter(packed, blueprint.directory, buffer.nbytes, spec.rank, spec.num_added)


def _piece(tensors: Mapping[str, Tensor], module: ModuleSpec, part: str, start: int, shape: BaseShape) -> Piece:
    """A or B of a linear; its B may be some rows of a tensor that serves several."""
    outputs, inputs = shape.size(module.module)
    if part == "a":
        return Piece(tensors[module.tensor_a], 0, module.rank, inputs, start, 1.0, is_turned=False)
    first = module.first_row * module.rank
    return Piece(tensors[module.tensor_b], first, outputs, module.rank, start, module.scale, is_turned=True)
