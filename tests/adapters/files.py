"""Adapter files for tests, honest and broken, for a base with grouped-query attention (4 heads, 2 KV heads)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from adapters.spec import LINEARS, BaseShape
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from adapters.validation import Limits

SHAPE = BaseShape(
    num_layers=2,
    vocab_size=384,
    hidden_size=64,
    linears={
        "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "gate_proj": (128, 64),
        "up_proj": (128, 64), "down_proj": (64, 128),
    },
    base_name="tiny",
)  # fmt: skip
LIMITS = Limits(max_rank=16)
PEFT_PREFIX = "base_model.model.model."


def key(layer: int, name: str, prefix: str = PEFT_PREFIX) -> str:
    block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"{prefix}layers.{layer}.{block}.{name}"


def pairs(
    targets: Iterable[str] = LINEARS, layers: Iterable[int] = (0, 1), rank: int = 4, prefix: str = PEFT_PREFIX
) -> dict[str, torch.Tensor]:
    """Random A and B of every target in every layer, in fp32."""
    draw = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in layers:
        for name in targets:
            out_features, in_features = SHAPE.linears[name]
            tensors[f"{key(layer, name, prefix)}.lora_A.weight"] = torch.randn(rank, in_features, generator=draw)
            tensors[f"{key(layer, name, prefix)}.lora_B.weight"] = torch.randn(out_features, rank, generator=draw)
    return tensors


def config(targets: Any = LINEARS, rank: int = 4, **changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": rank, "lora_alpha": 8,
        "bias": "none", "target_modules": list(targets) if isinstance(targets, tuple) else targets,
    } | changes  # fmt: skip


def write(directory: Path, tensors: Mapping[str, torch.Tensor] | bytes, settings: Mapping[str, Any] | bytes) -> Path:
    """Both files of an adapter; bytes are written as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(tensors, bytes):
        (directory / WEIGHTS_FILE).write_bytes(tensors)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS_FILE)
    text = settings if isinstance(settings, bytes) else json.dumps(settings).encode()
    (directory / CONFIG_FILE).write_bytes(text)
    return directory


def raw(header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], begin: int, dtype: str = "F32") -> dict[str, Any]:
    size = int(np.prod(shape)) * {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F64": 8}[dtype]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
