"""The numbers of an adapter: finite, and within what every engine dtype can hold. numpy, no torch.

They are read in chunks into one buffer, never mapped: a file that shrinks under a map kills the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.header import Tensor
from adapters.spec import AdapterInvalid, shown

MAX_MAGNITUDE = 65504.0
"""Of fp16. No trained adapter comes near; above it, the same file would work in one engine dtype and not in another."""

_CHUNK_BYTES = 4 << 20


def check_values(file: FileIO, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
    """Raises AdapterInvalid for NaN, infinity and magnitudes above MAX_MAGNITUDE, before and after scaling.

    scales: name of a B → what it will be multiplied by.
    """
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    for tensor in tensors.values():
        largest = _largest(file, tensor, buffer)
        if not largest < np.inf:
            raise AdapterInvalid("values_not_finite", f"{shown(tensor.name)} holds NaN or infinity", tensor.name)
        if largest * max(1.0, scales.get(tensor.name, 1.0)) > MAX_MAGNITUDE:
            raise AdapterInvalid(
                "values_out_of_range",
                f"{shown(tensor.name)} holds values above {MAX_MAGNITUDE:g} in magnitude (B as scaled by alpha)",
                tensor.name,
            )


def _largest(file: FileIO, tensor: Tensor, buffer: npt.NDArray[np.uint8]) -> float:
    """The largest magnitude; NaN or infinity if there is one: without its sign, an IEEE number orders as an integer."""
    unsigned = np.dtype("<u4") if tensor.dtype == "F32" else np.dtype("<u2")
    mask = unsigned.type(0x7FFFFFFF if tensor.dtype == "F32" else 0x7FFF)
    largest = 0
    position = tensor.begin
    file.seek(position)
    while position < tensor.end:
        count = read_into(file, buffer.data[: min(_CHUNK_BYTES, tensor.end - position)], tensor)
        position += count
        bits = buffer[:count].view(unsigned)
        np.bitwise_and(bits, mask, out=bits)
        largest = max(largest, int(bits.max()))
    return _as_float(largest, tensor.dtype)


def _as_float(bits: int, dtype: str) -> float:
    if dtype == "F16":
        return float(np.array(bits, "<u2").view("<f2"))
    return float(np.array(bits << 16 if dtype == "BF16" else bits, "<u4").view("<f4"))


def read_into(file: FileIO, view: Any, tensor: Tensor) -> int:
    """Fills `view` from the file; AdapterInvalid when the file ends before."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise AdapterInvalid(
                "weights_truncated", f"weights: the file ends inside {shown(tensor.name)}", tensor.name
            )
        done += count
    return done
