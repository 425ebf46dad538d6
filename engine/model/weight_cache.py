"""WeightCache: a file with the layers that calibration made, so that the next start reads them. Knows no model and no
number of bits.

One file for each base, beside the native operations; whatever its weights follow from is in its name. It is written
under another name first, and read only if its digest is right: who starts at the same time, or finds a damaged file,
makes the layers anew."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.transformer import Layer, Linear
from engine.ops.native import NativeOps
from engine.quantization import Quantization

log = logging.getLogger(__name__)

DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
DIGEST = "sha256"
FINGERPRINT_DIGITS = 16


class WeightCache:
    """For the base of this fingerprint: `parts` say all else that its layers follow from."""

    def __init__(self, directory: Path, fingerprint: str, parts: list[str]) -> None:
        self._directory = directory
        self._prefix = f"layers-{fingerprint[:FINGERPRINT_DIGITS]}-"
        key = hashlib.sha256("\0".join([fingerprint, *parts]).encode()).hexdigest()[:20]
        self.path = directory / f"{self._prefix}{key}.safetensors"

    def load(self) -> dict[str, Tensor] | None:
        """None where there is no file, or not the one that was written."""
        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                is_sound = (file.metadata() or {}).get(DIGEST) == _digest(tensors)
        except (SafetensorError, OSError) as error:
            log.warning("%s can't be read, its weights are calibrated anew: %s", self.path, error)
            return None
        if not is_sound:
            log.warning("%s is damaged, its weights are calibrated anew", self.path)
            return None
        log.info("quantised weights read from %s", self.path)
        return tensors

    def store(self, tensors: dict[str, Tensor]) -> None:
        """In place of what there is for this base. A disk that takes none costs the next start its time."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, draft = tempfile.mkstemp(prefix=self._prefix, suffix=".tmp", dir=self._directory)
            try:
                with os.fdopen(handle, "wb") as file:
                    _write(file, tensors)
                Path(draft).replace(self.path)
            finally:
                Path(draft).unlink(missing_ok=True)
            for other in self._directory.glob(f"{self._prefix}*.safetensors"):
                if other != self.path:
                    other.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s can't be written, the next start calibrates again: %s", self.path, error)


class RestoringOps:
    """Ops whose linears are what a cache has of them, in the order in which they were packed."""

    def __init__(self, ops: NativeOps, tensors: dict[str, Tensor]) -> None:
        self._ops = ops
        self._tensors = tensors
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack_linear(self, weight_OH: Tensor, quantization: Quantization | None = None) -> Any:
        self._count += 1
        outputs, inputs = weight_OH.shape
        return self._ops.restore_linear(self._tensors[_data(self._count - 1)], outputs, inputs, quantization)

    def squares(self, packed: Any, weight_OH: Tensor) -> Tensor:
        return self._tensors[_squares(self._count - 1)]


def tensors_of(layers: list[Layer]) -> dict[str, Tensor]:
    """What RestoringOps needs to give the linears of these layers again."""
    linears = list(_linears(layers))
    squares = {_squares(index): linear.squares_O for index, linear in enumerate(linears)}
    return squares | {_data(index): linear.packed.data for index, linear in enumerate(linears)}


def _linears(layers: list[Layer]) -> Iterator[Linear]:
    for layer in layers:
        yield from (layer.qkv, layer.o, layer.gate_up, layer.down)


def _data(index: int) -> str:
    return f"{index}.data"


def _squares(index: int) -> str:
    return f"{index}.squares"


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of names, kinds and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _write(file: Any, tensors: dict[str, Tensor]) -> None:
    """As safetensors, from where the tensors lie: the library's own writer would copy all of them first."""
    header: dict[str, Any] = {"__metadata__": {DIGEST: _digest(tensors)}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        file.write(tensor.numpy())
