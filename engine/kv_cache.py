"""KVCache: the memory of keys and values. Which block is whose is the block pool's business."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adapters.numbers import aligned_zeros
from engine.model.config import ModelConfig
from engine.prefault import Prefault


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
        self.layers: list[Tensor] = [zeros(shape, dtype, device) for _ in range(model.num_layers)]

    def prefault(self) -> Prefault:
        """A context that makes the memory real, first blocks first, so that no step has to."""
        is_host = self.layers[0].device.type == "cpu"
        return Prefault([half for layer in self.layers for half in layer] if is_host else [])

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks, (source, destination) each, before anything of the step is written."""
        if not copies:
            return
        sources, destinations = torch.tensor(copies, device=self.layers[0].device).unbind(1)
        for layer in self.layers:
            blocks = layer.view(2, self.num_blocks, -1)
            blocks[:, destinations] = blocks[:, sources]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """On the CPU, pages that become real memory when first written; torch.zeros would write them all at start."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(aligned_zeros(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
