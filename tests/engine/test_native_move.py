"""The native mover of stored matrices, equal bit for bit to the one that needs nothing but numpy."""

from __future__ import annotations

import numpy as np
import pytest

from adapters import spans
from adapters.header import Tensor
from adapters.numbers import STORED, Array, widen
from adapters.spans import Piece, Span
from engine.ops.native import NativeOps
from tests.engine.test_native import ops

__all__ = ["ops"]

SIZES = [(1, 1), (8, 576), (576, 8), (3, 17), (130, 65), (64, 64), (1, 200), (200, 1)]
SCALES = [1.0, 2.0, 0.3, -1.5, 0.0]


def span_of(kind: str, draw: np.random.Generator) -> tuple[Span, int]:
    """Matrices of all sizes and scales, some turned, at places of the buffer that don't touch; the buffer's size."""
    tensors, pieces, begin, target = [], [], 0, 0
    for rows, columns in SIZES:
        for scale in SCALES:
            count = rows * columns
            tensor = Tensor("w", kind, (rows, columns), begin, begin + count * STORED[kind].itemsize)
            piece = Piece(tensor, 0, rows, columns, target, scale, is_turned=bool(draw.integers(2)))
            pieces.append((begin // STORED[kind].itemsize, piece))
            tensors.append(tensor)
            begin, target = tensor.end, target + count + int(draw.integers(1, 40))
    return Span(tensors, pieces), target


def numbers(kind: str, count: int, draw: np.random.Generator) -> Array:
    """Finite ones of every size, zeros of both signs and denormals among them."""
    stored = STORED[kind]
    bits = draw.integers(0, 2 ** (8 * stored.itemsize), count, np.uint64).astype(f"<u{stored.itemsize}")
    values = bits.view(stored)
    values[~(np.abs(widen(values, kind)) < 1e30)] = 0
    values[:4] = np.array([0, 1, 1 << (8 * stored.itemsize - 1), 3], bits.dtype).view(stored)
    return values


@pytest.mark.parametrize("target", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("source", ["BF16", "F32", "F16"])
def test_moves_as_numpy_does(ops: NativeOps, source: str, target: str) -> None:
    draw = np.random.default_rng(7)
    span, size = span_of(source, draw)
    stored = numbers(source, span.num_bytes // STORED[source].itemsize, draw)
    wanted, got = (np.full(size, 9, STORED[target]) for _ in range(2))

    with np.errstate(over="ignore", invalid="ignore"):
        spans.move(stored, source, span, wanted, target)
        ops.move(stored, source, span, got, target)

    assert np.array_equal(got.view(np.uint8), wanted.view(np.uint8))
