"""Calibration: quantises layer after layer by what the layers read when the model sees some text. Knows no file and no
format of weights.

The inputs of a layer are those that the quantised layers before it produce, and within a layer each linear is quantised
when its turn comes: later weights make up for what earlier ones lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.model.config import ModelConfig
from engine.model.transformer import Layer, Linear, Transformer
from engine.model.weight_cache import WeightCache
from engine.ops import LoraSlices, Moments, Ops, Replay
from engine.quantization import Quantization

BLOCK_SIZE = 16
ROW_TOKENS = 256
MAX_ROWS = 32
TEXT = Path(__file__).with_name("calibration.txt")
"""Prose, letters, documentation, code, contracts, dialogue, numbers: what a model is quantised by should look a little
like what it will read."""

DAMPING = 0.01
"""Of the mean second moment, added to each: the text shows only some of the directions that inputs can take."""


@dataclass(frozen=True)
class Calibration:
    """rows_SL: texts of one length, a multiple of BLOCK_SIZE; cache: where the layers that they made are kept."""

    rows_SL: Tensor
    cache: WeightCache | None = None


def calibration_rows(tokens: list[int]) -> Tensor:
    """[S, ROW_TOKENS] of the tokens of TEXT, in whatever tokenizer the model has."""
    num_rows = min(MAX_ROWS, len(tokens) // ROW_TOKENS)
    return torch.tensor(tokens[: num_rows * ROW_TOKENS]).view(num_rows, ROW_TOKENS)


def quantise_layers(
    config: ModelConfig, ops: Ops, embedding_VH: Tensor, read: Callable[[int, Ops], Layer], tokens_SL: Tensor
) -> list[Layer]:
    """The layers that read(index, ops) gives, one in memory at a time, quantised. `tokens_SL`: texts of one length, a
    multiple of BLOCK_SIZE."""
    measuring: Any = _MeasuringOps(ops)
    layers = _Layers(config.num_layers, lambda index: read(index, measuring))
    nothing_H = torch.ones(config.hidden_size)
    unused = Linear(None, nothing_H)
    model = Transformer(config, measuring, embedding_VH, layers, nothing_H, unused)  # type: ignore[arg-type]
    cache = KVCache(replace(config, num_layers=1), tokens_SL.numel() // BLOCK_SIZE, BLOCK_SIZE, ops.weight_dtype)
    cache.layers *= config.num_layers  # one in turn: nobody reads a layer's KV again
    model.forward(_batch(tokens_SL), cache)
    return layers.done


def moments_of(x_TH: Tensor) -> Moments:
    """Of a linear's inputs. U is the inverse of the upper Cholesky factor, got by turning rows and columns round, as
    LAPACK knows the lower one."""
    moments_HH = x_TH.t() @ x_TH / len(x_TH)
    diagonal_H = moments_HH.diagonal()
    diagonal_H += DAMPING * diagonal_H.mean().clamp_min(1e-12)
    lower_HH = torch.linalg.cholesky(moments_HH.flip(0, 1))
    inverse_HH = torch.linalg.solve_triangular(lower_HH, torch.eye(len(lower_HH)), upper=False)
    return Moments(moments_HH, inverse_HH.flip(0, 1).contiguous())


class _Waiting:
    """A weight whose inputs haven't been seen yet."""

    def __init__(self, weight_OH: Tensor, quantization: Quantization | None) -> None:
        self.weight_OH: Tensor | None = weight_OH
        self.quantization = quantization
        self.packed: Any = None
        self.squares_O: Tensor | None = None

    def pack(self, ops: Ops, x_TH: Tensor) -> None:
        assert self.weight_OH is not None
        self.packed = ops.pack_linear(self.weight_OH, self.quantization, moments_of(x_TH))
        self.squares_O = ops.squares(self.packed, self.weight_OH)
        self.weight_OH = None


class _MeasuringOps:
    """Ops whose linears are packed when they are first used."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack_linear(self, weight_OH: Tensor, quantization: Quantization | None = None) -> _Waiting:
        return _Waiting(weight_OH, quantization)

    def squares(self, packed: _Waiting, weight_OH: Tensor) -> Tensor:
        return torch.empty(0)  # with the packing

    def adapted_linear(
        self, x_TH: Tensor, packed: _Waiting, bias_O: Tensor | None, plan: Any, layer: int, slices: LoraSlices
    ) -> Tensor:
        packed.pack(self._ops, x_TH)
        return self._ops.linear(x_TH, packed.packed, bias_O)

    def replay(self) -> Replay:
        return lambda body, inputs, plan: body(*inputs, plan)


class _Layers:
    """Layers in turn, each read when it is wanted and quantised when the next one is."""

    def __init__(self, count: int, read: Callable[[int], Layer]) -> None:
        self._count = count
        self._read = read
        self._current: Layer | None = None
        self.done: list[Layer] = []

    def __iter__(self) -> Iterator[Layer]:
        for index in range(self._count):
            self._current = self._read(index)
            yield self._current
            self.done.append(_packed(self._current))

    def __getitem__(self, index: int) -> Layer:
        assert self._current is not None
        assert index == len(self.done)
        return self._current


def _packed(layer: Layer) -> Layer:
    return replace(
        layer,
        qkv=_finished(layer.qkv),
        o=_finished(layer.o),
        gate_up=_finished(layer.gate_up),
        down=_finished(layer.down),
    )


def _finished(linear: Linear) -> Linear:
    waiting = linear.packed
    return Linear(waiting.packed, waiting.squares_O, linear.bias)


def _batch(tokens_SL: Tensor) -> ForwardBatch:
    """Texts as the rows of one step, each in blocks of its own."""
    num_rows, length = tokens_SL.shape
    starts_S = np.arange(num_rows, dtype=np.int64) * length
    lengths_S = np.full(num_rows, length, np.int64)
    return ForwardBatch(
        tokens_T=tokens_SL.flatten(),
        positions_T=torch.arange(length).repeat(num_rows),
        slots_T=torch.arange(num_rows * length),
        starts_S=starts_S,
        lengths_S=lengths_S,
        contexts_S=lengths_S,
        tables_SB=np.arange(num_rows * length // BLOCK_SIZE, dtype=np.int64).reshape(num_rows, -1),
        block_size=BLOCK_SIZE,
        logit_rows=torch.arange(0),
        logit_counts=(0,) * num_rows,
    )
