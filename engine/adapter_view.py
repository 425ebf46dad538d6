"""AdapterView: what a packed adapter does, as views of its buffer. Knows no bank and no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from adapters.loader import (
    FLAGS,
    HAS_ADDED,
    HAS_BIAS,
    HAS_G,
    HAS_TOKENS,
    IS_WHOLE,
    OFFSET_A,
    OFFSET_B,
    OFFSET_BIAS,
    OFFSET_G,
    RANK,
    UNIT,
    PackedAdapter,
)
from adapters.spec import LINEARS, MODULES, TABLES, BaseShape


class LoraPart(NamedTuple):
    """What an adapter does to one linear, views of the arena: Aᵀ [H, R] and B [R, O] with the scale folded in, gain
    and shift [O] fp32; None = not that. y = gain ∘ (W·x + b + B·A·x) + shift."""

    a_HR: Tensor | None
    b_RO: Tensor | None
    gain_O: Tensor | None = None
    shift_O: Tensor | None = None


@dataclass(frozen=True)
class TablePart:
    """What an adapter does to embed_tokens or lm_head; None = not that.

    a, b        of embed_tokens A [V, R] and B [H, R], of lm_head A [R, H] and B [V, R]
    weight_VH   replaces the whole table;  rows_NH replace those of ids_N (ascending)
    added_NH    follow the base's rows: they are of new tokens, and V counts them, too
    gain, shift fp32, as wide as the table's result
    """

    a: Tensor | None = None
    b: Tensor | None = None
    weight_VH: Tensor | None = None
    rows_NH: Tensor | None = None
    ids_N: Tensor | None = None
    added_NH: Tensor | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None


@dataclass(frozen=True)
class Extras:
    """What an adapter changes outside the linears: tables, and norms by (layer, module), fp32; `num_added` tokens."""

    embedding: TablePart | None
    head: TablePart | None
    norms: Mapping[tuple[int, int], Tensor]
    num_added: int = 0


Table = tuple[tuple[LoraPart | None, ...], ...]
"""[layer][module] → part, None where the adapter lacks it."""


class AdapterView:
    """Views of a packed adapter's buffer, by its directory."""

    def __init__(self, host: PackedAdapter, shape: BaseShape) -> None:
        self._buffer = host.buffer
        self._directory = host.directory
        self._shape = shape.grown(host.num_added)

    @cached_property
    def _rows(self) -> list[list[list[int]]]:
        return cast("list[list[list[int]]]", self._directory.tolist())

    @property
    def _is_of_linears(self) -> bool:
        """Seen without a look at each of hundreds of rows: this is asked between steps."""
        directory = self._directory.numpy()
        return not directory[:-1, len(LINEARS) :].any() and not directory[-1].any()

    def table(self) -> Table:
        return tuple(
            tuple(self._linear(fields, name) for fields, name in zip(modules, LINEARS, strict=False))
            for modules in self._rows[:-1]
        )

    def extras(self) -> Extras | None:
        """None for an adapter of linears only."""
        if self._is_of_linears:
            return None
        norms = {
            (layer, module): self._vector(fields[OFFSET_A], self._shape.size(MODULES[module])[0])
            for layer, modules in enumerate(self._rows)
            for module, fields in enumerate(modules)
            if fields[FLAGS] & IS_WHOLE and MODULES[module] not in TABLES
        }
        embedding, head = (self._table_part(name) for name in TABLES)
        return Extras(embedding, head, norms, self._shape.num_added) if embedding or head or norms else None

    def _linear(self, fields: list[int], name: str) -> LoraPart | None:
        rank = fields[RANK]
        if rank == 0 and fields[FLAGS] == 0:
            return None
        outputs, inputs = self._shape.linears[name]
        a = self._matrix(fields[OFFSET_A], rank, inputs).t() if rank else None
        b = self._matrix(fields[OFFSET_B], rank, outputs) if rank else None
        return LoraPart(a, b, *self._vectors(fields, outputs))

    def _table_part(self, name: str) -> TablePart | None:
        fields = self._rows[-1][MODULES.index(name)]
        flags, rank = fields[FLAGS], fields[RANK]
        if rank == 0 and flags == 0:
            return None
        shape = self._shape
        first, second = fields[OFFSET_A], fields[OFFSET_B]
        if flags & IS_WHOLE:
            return TablePart(weight_VH=self._matrix(first, shape.vocab_size, shape.hidden_size))
        added = self._matrix(fields[OFFSET_G], shape.num_added, shape.hidden_size) if flags & HAS_ADDED else None
        if flags & HAS_TOKENS:
            ids = self._buffer[second * UNIT :][: rank * (8 // self._buffer.itemsize)].view(torch.int64)
            return TablePart(rows_NH=self._matrix(first, rank, shape.hidden_size), ids_N=ids, added_NH=added)
        if rank == 0:
            return TablePart(added_NH=added)
        outputs, inputs = shape.size(name)
        sizes = (inputs, rank) if name == "embed_tokens" else (rank, inputs)
        gain, shift = self._vectors(fields, outputs)
        return TablePart(
            self._matrix(first, *sizes), self._matrix(second, outputs, rank), added_NH=added, gain=gain, shift=shift
        )

    def _vectors(self, fields: list[int], width: int) -> tuple[Tensor | None, Tensor | None]:
        gain = self._vector(fields[OFFSET_G], width) if fields[FLAGS] & HAS_G else None
        return gain, self._vector(fields[OFFSET_BIAS], width) if fields[FLAGS] & HAS_BIAS else None

    def _matrix(self, offset: int, rows: int, columns: int) -> Tensor:
        start = offset * UNIT
        return self._buffer[start : start + rows * columns].view(rows, columns)

    def _vector(self, offset: int, width: int) -> Tensor:
        """fp32, whatever the buffer's dtype."""
        start = offset * UNIT
        return self._buffer[start : start + width * (4 // self._buffer.itemsize)].view(torch.float32)
