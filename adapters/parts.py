"""The parts of one module of an adapter, read and computed one by one: what is more than A and B of a linear."""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO
from typing import Protocol

import numpy as np

from adapters.header import Tensor
from adapters.numbers import Array, cast, last_rows, read, widen
from adapters.spec import AdapterInvalid, BaseShape, ModuleSpec


class BaseWeights(Protocol):
    """What some adapters need to know of the base's weights. Called in the threads that load adapters."""

    def bias(self, layer: int, module: str) -> Array | None:
        """[out] fp32; None where there is none."""
        ...

    def squared_norms(self, layer: int, module: str, a_RI: Array, b_OR: Array) -> Array:
        """[out]: ‖W[o] + (B·A)[o]‖² for each output, with W [out, in]."""
        ...


class Parts:
    """Those of `module`, when they are asked for, as the engine stores them: see loader.PackedAdapter."""

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
        self._num_added = shape.num_added
        self._rows = slice(module.first_row, module.first_row + shape.size(module.module)[0])
        self._base = base
        self._gain: Array | None = None

    def get(self, part: str, kind: str) -> Array:
        module = self._module
        if part == "a":
            a = self._cast(module.tensor_a, kind)
            return np.ascontiguousarray(a.T) if module.module == "embed_tokens" else a
        if part == "b":
            return self._cast(module.tensor_b, kind, module.scale)[self._rows]
        if part == "weight":
            weight = self._cast(module.weight, kind)
            return self._wide(module.weight) if weight.ndim == 1 else weight
        if part == "added":
            rows = last_rows(self._tensors[module.added], self._num_added)
            return cast(read(self._file, rows), rows.dtype, kind, 1.0)
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
