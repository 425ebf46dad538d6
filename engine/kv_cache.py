"""KVCache: the memory of keys and values, and the plan of how much of everything fits. Block numbers come from
block_pool; this file only holds the bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.model.config import ModelConfig


class KVCache:
    """Paged keys and values: `layers[i]` is [2, num_blocks · block_size, K, D], keys first. Starts as zeros: padded
    reads must find finite numbers."""

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (2, num_blocks * block_size, model.num_kv_heads, model.head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layers: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks, (source, destination) each, before anything of the step is written."""
        if not copies:
            return
        sources, destinations = torch.tensor(copies, device=self.layers[0].device).unbind(1)
        for layer in self.layers:
            blocks = layer.view(2, self.num_blocks, -1)
            blocks[:, destinations] = blocks[:, sources]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How the memory of one engine is divided, decided before anything is allocated."""

    device: str
    dtype: str
    available_bytes: int
    weights_bytes: int
    workspace_bytes: int
    adapter_bytes: int
    kv_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int


def plan_memory(config: EngineConfig, model: ModelConfig) -> MemoryPlan:
    """Divides the memory; raises ConfigError naming the nearest setting that fits."""
    raise NotImplementedError
