"""Floats as safetensors store them, in numpy, which has no bfloat16: its bits travel as integers."""

from __future__ import annotations

from dataclasses import replace
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.header import Tensor
from adapters.values import read_into

STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

LINE_BYTES = 64

_CHUNK = 1 << 15

Array = npt.NDArray[Any]


def aligned_zeros(num_bytes: int) -> Array:
    """Bytes that begin with a line of the processor's cache: loads of a whole line would else touch two. Pages become
    real memory when they are first written."""
    raw = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % LINE_BYTES
    return raw[start : start + num_bytes]


def read(file: FileIO, tensor: Tensor) -> Array:
    """A tensor as it is stored."""
    raw = np.empty(tensor.end - tensor.begin, np.uint8)
    file.seek(tensor.begin)
    read_into(file, raw.data, tensor)
    return raw.view(STORED[tensor.dtype]).reshape(tensor.shape)


def last_rows(tensor: Tensor, count: int) -> Tensor:
    """The last `count` rows of a matrix, as a tensor of its own."""
    row_bytes = (tensor.end - tensor.begin) // tensor.shape[0]
    return replace(tensor, shape=(count, *tensor.shape[1:]), begin=tensor.end - count * row_bytes)


def widen(stored: Array, source: str) -> Array:
    """As fp32."""
    if source == "BF16":
        return (stored.astype("<u4") << np.uint32(16)).view("<f4")
    return stored.astype("<f4", copy=False)


def cast(stored: Array, source: str, target: str, scale: float) -> Array:
    """stored · scale in the target's representation: computed in fp32, rounded once, to nearest even. Piece by piece,
    so that what is computed on the way stays in the processor's cache."""
    if source == target and scale == 1.0:
        return stored
    values = np.empty(stored.shape, STORED[target])
    flat, whole = stored.reshape(-1), values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        wide = widen(flat[start : start + _CHUNK], source)
        if scale != 1.0:
            wide = wide * np.float32(scale)
        whole[start : start + _CHUNK] = _narrow(wide) if target == "BF16" else wide
    return values


def _narrow(wide: Array) -> Array:
    """The upper half of fp32, rounded to nearest even; among integers of 4 bytes."""
    bits = wide.view("<u4")
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    return odd
