"""Spans: A and B of all linears, read from the weights file in a few long pieces and moved many at a time: there are
hundreds of them in an adapter, and each operation on a single one costs more than its bytes.

Who moves them is the engine's choice; move() here needs nothing but numpy, which releases the interpreter's lock only
inside operations on large arrays: the step loop waits for what is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO

import numpy as np

from adapters.header import Tensor
from adapters.numbers import STORED, Array, cast
from adapters.values import read_into

MAX_SPAN_BYTES = 1 << 20
"""One tensor that is larger is a span of its own. What was just read is in the processor's cache when it is moved."""
MOVE = np.dtype([(name, "<i8") for name in ("source", "rows", "columns", "target", "is_turned")] + [("scale", "<f8")])
"""A matrix [rows, columns] · scale from its first element in a span to its first element in the buffer, there as
[columns, rows] where it is turned."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix [rows, columns], row after row, within a tensor, and where it goes.

    first        its first element in the tensor
    start        its first element in the packed buffer
    is_turned    it is packed as [columns, rows]
    """

    tensor: Tensor
    first: int
    rows: int
    columns: int
    start: int
    scale: float
    is_turned: bool

    @property
    def count(self) -> int:
        return self.rows * self.columns


@dataclass
class Span:
    """Neighbours in the file, of one dtype; its pieces, each with its first element within the span."""

    tensors: list[Tensor]
    pieces: list[tuple[int, Piece]] = field(default_factory=list)

    @cached_property
    def moves(self) -> Array:
        """All of them, as MOVE."""
        return np.array(
            [(first, each.rows, each.columns, each.start, each.is_turned, each.scale) for first, each in self.pieces],
            MOVE,
        )

    @property
    def begin(self) -> int:
        return self.tensors[0].begin

    @property
    def num_bytes(self) -> int:
        return self.tensors[-1].end - self.begin

    def takes(self, tensor: Tensor) -> bool:
        """It may be the next one here."""
        last = self.tensors[-1]
        return (
            tensor.dtype == last.dtype
            and tensor.begin in (last.begin, last.end)
            and tensor.end - self.begin <= MAX_SPAN_BYTES
        )

    def add(self, piece: Piece) -> None:
        if piece.tensor != self.tensors[-1]:
            self.tensors.append(piece.tensor)
        first = (piece.tensor.begin - self.begin) // STORED[piece.tensor.dtype].itemsize + piece.first
        self.pieces.append((first, piece))


def spans(pieces: Iterable[Piece]) -> list[Span]:
    """As few as there can be, in the order of the file."""
    found: list[Span] = []
    for piece in sorted(pieces, key=lambda piece: (piece.tensor.begin, piece.first)):
        if not found or not found[-1].takes(piece.tensor):
            found.append(Span([piece.tensor]))
        found[-1].add(piece)
    return found


Move = Callable[[Array, str, Span, Array, str], None]
"""Puts the pieces of a span into the buffer: (what was read, its kind, the span, the buffer, its kind). Each number is
multiplied in fp32 and rounded once, to nearest even. Called by several threads."""


def pack(file: FileIO, found: list[Span], buffer: Array, kind: str, move: Move) -> None:
    """Puts all pieces into the buffer, whose numbers are of `kind`."""
    raw = np.empty(max((span.num_bytes for span in found), default=0), np.uint8)
    for span in found:
        file.seek(span.begin)
        read_into(file, raw.data[: span.num_bytes], span.tensors[-1])
        dtype = span.tensors[0].dtype
        move(raw[: span.num_bytes].view(STORED[dtype]), dtype, span, buffer, kind)


def move(stored: Array, source: str, span: Span, buffer: Array, target: str) -> None:
    """Move, for all kinds."""
    by_scale: dict[float, list[tuple[int, Piece]]] = {}
    for first, piece in span.pieces:
        by_scale.setdefault(piece.scale, []).append((first, piece))
    for scale, pieces in by_scale.items():
        views = [stored[first : first + piece.count] for first, piece in pieces]
        if source != target or scale != 1.0:
            views = list(_cut(cast(np.concatenate(views), source, target, scale), pieces))
        for view, (_, piece) in zip(views, pieces, strict=True):
            _place(view, piece, buffer)


def _cut(values: Array, pieces: Iterable[tuple[int, Piece]]) -> Iterator[Array]:
    end = 0
    for _, piece in pieces:
        first, end = end, end + piece.count
        yield values[first:end]


def _place(values: Array, piece: Piece, buffer: Array) -> None:
    target = buffer[piece.start : piece.start + piece.count]
    if piece.is_turned:
        target.reshape(piece.columns, piece.rows)[...] = values.reshape(piece.rows, piece.columns).T
    else:
        target[...] = values
