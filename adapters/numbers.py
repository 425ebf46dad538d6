"""Floats as safetensors store them, in numpy, which has no bfloat16: its bits travel as integers."""

from __future__ import annotations

from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.header import Tensor
from adapters.values import read_into

STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

Array = npt.NDArray[Any]


def read(file: FileIO, tensor: Tensor) -> Array:
    """A tensor as it is stored."""
    raw = np.empty(tensor.end - tensor.begin, np.uint8)
    file.seek(tensor.begin)
    read_into(file, raw.data, tensor)
    return raw.view(STORED[tensor.dtype]).reshape(tensor.shape)


def widen(stored: Array, source: str) -> Array:
    """As fp32."""
    if source == "BF16":
        return (stored.astype("<u4") << np.uint32(16)).view("<f4")
    return stored.astype("<f4", copy=False)


def cast(stored: Array, source: str, target: str, scale: float) -> Array:
    """stored · scale in the target's representation: computed in fp32, rounded once, to nearest even."""
    if source == target and scale == 1.0:
        return stored
    wide = widen(stored, source)
    if scale != 1.0:
        wide = wide * np.float32(scale)
    if target == "BF16":
        bits = wide.view("<u4")
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    return wide.astype(STORED[target], copy=False)
