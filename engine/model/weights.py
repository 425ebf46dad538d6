"""From *.safetensors to a Transformer: every tensor of the checkpoint is used, or the load fails and names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ConfigError
from engine.model.calibration import Calibration, quantise_layers
from engine.model.config import ModelConfig
from engine.model.transformer import Layer, Linear, Transformer
from engine.model.weight_cache import RestoringOps, tensors_of
from engine.ops import Ops
from engine.quantization import Quantization

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    path: Path,
    config: ModelConfig,
    ops: Ops,
    device: torch.device | str = "cpu",
    quantization: Quantization | None = None,
    calibration: Calibration | None = None,
) -> Transformer:
    """Reads the checkpoint in `path` layer by layer, so that little more than the model itself is in memory. With a
    calibration, layers are quantised by what they read of its texts. Raises ConfigError where a tensor is missing, left
    over, damaged or of another shape or dtype."""
    with _opened(path) as files:
        reader = _Reader(files, ops, device, quantization)
        hidden, vocab = config.hidden_size, config.vocab_size
        embedding_VH = reader.take("model.embed_tokens.weight", vocab, hidden)
        if calibration is None:
            layers = _layers(reader, config, ops)
        else:
            layers = _calibrated_layers(reader, config, embedding_VH, calibration)
        norm_H = reader.norm("model.norm.weight", hidden)
        for_head = quantization and quantization.careful
        if config.tie_word_embeddings:
            reader.ignore("lm_head.weight")
            head = _packed(ops, embedding_VH, for_head)
        else:
            head = _packed(ops, reader.take("lm_head.weight", vocab, hidden), for_head)
        reader.finish()
    return Transformer(config, ops, embedding_VH, layers, norm_H, head)


def _layers(reader: _Reader, config: ModelConfig, ops: Any) -> list[Layer]:
    return [_layer_for(reader, config, index, ops) for index in range(config.num_layers)]


def _calibrated_layers(
    reader: _Reader, config: ModelConfig, embedding_VH: Tensor, calibration: Calibration
) -> list[Layer]:
    """As the cache has them, or made and left there."""
    ops: Any = reader.ops
    cache = calibration.cache
    known = None if cache is None else cache.load()
    if known is not None:
        return _layers(reader, config, RestoringOps(ops, known))
    layers = quantise_layers(config, ops, embedding_VH, partial(_layer_for, reader, config), calibration.rows_SL)
    if cache is not None:
        cache.store(tensors_of(layers))
    return layers


def _layer_for(reader: _Reader, config: ModelConfig, index: int, ops: Ops) -> Layer:
    return _layer(reader.with_ops(ops), config, index)


def _layer(reader: _Reader, config: ModelConfig, index: int) -> Layer:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    has_qk_norm = config.qk_norm
    reader.ignore(f"{prefix}.self_attn.rotary_emb.inv_freq")  # a constant that old exporters wrote
    return Layer(
        input_norm=reader.norm(f"{prefix}.input_layernorm.weight", hidden),
        qkv=_linear(reader, config, index, "self_attn", ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        q_norm=reader.norm(f"{prefix}.self_attn.q_norm.weight", config.head_dim) if has_qk_norm else None,
        k_norm=reader.norm(f"{prefix}.self_attn.k_norm.weight", config.head_dim) if has_qk_norm else None,
        o=_linear(reader, config, index, "self_attn", ("o_proj",), config.o_bias),
        post_norm=reader.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=_linear(reader, config, index, "mlp", ("gate_proj", "up_proj"), config.mlp_bias),
        down=_linear(reader, config, index, "mlp", ("down_proj",), config.mlp_bias),
        window=config.windows[index],
    )


def _linear(
    reader: _Reader, config: ModelConfig, index: int, block: str, names: tuple[str, ...], has_bias: bool
) -> Linear:
    """Linears of a layer that read the same input, as one."""
    block = f"model.layers.{index}.{block}"
    weights = [reader.take(f"{block}.{name}.weight", *config.linears[name]) for name in names]
    bias = None
    if has_bias:
        parts = [reader.take(f"{block}.{name}.bias", config.linears[name][0]) for name in names]
        bias = torch.cat(parts).to(reader.ops.activation_dtype)
    kind = reader.quantization and reader.quantization.of(names[0], index, config.num_layers)
    return _packed(reader.ops, torch.cat(weights) if len(weights) > 1 else weights[0], kind, bias)


def _packed(ops: Ops, weight_OH: Tensor, quantization: Quantization | None, bias_O: Tensor | None = None) -> Linear:
    packed = ops.pack_linear(weight_OH, quantization)
    return Linear(packed, ops.squares(packed, weight_OH), bias_O)


class _Reader:
    """Takes tensors by name and keeps account of what is left."""

    def __init__(
        self, files: dict[str, Any], ops: Ops, device: torch.device | str, quantization: Quantization | None
    ) -> None:
        self.ops = ops
        self.quantization = quantization
        self._files = files
        self._device = device
        self._left = set(files)

    def with_ops(self, ops: Ops) -> _Reader:
        """The same account, for other ops."""
        other = copy(self)
        other.ops = ops
        return other

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in DTYPES:
            raise ConfigError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, expected a float of shape {shape}"
            )
        self._left.discard(name)
        return tensor.to(self._device, self.ops.weight_dtype)

    def norm(self, name: str, size: int) -> Tensor:
        return self.take(name, size).to(self.ops.activation_dtype)

    def ignore(self, name: str) -> None:
        self._left.discard(name)

    def finish(self) -> None:
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ConfigError(
                f"the checkpoint holds tensors that this model has no place for: {', '.join(names[:5])}{more}"
            )


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, Any]]:
    """Tensor name → open file. Shards are named by model.safetensors.index.json."""
    with ExitStack() as stack:
        try:
            handles = {file: stack.enter_context(safe_open(path / file, framework="pt")) for file in _file_names(path)}
            yield {name: handle for handle in handles.values() for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: the weights can't be read: {error}") from error


def _file_names(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is not an index of shards: {error!r}") from error
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise ConfigError(f"{path} holds no model.safetensors (pickled weights are not read)")
