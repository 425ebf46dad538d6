"""KVCache copies whole blocks, and takes no memory before it is written."""

from __future__ import annotations

import torch

from engine.kv_cache import KVCache
from engine.model.config import ModelConfig
from tests.tiny import tiny_config

MODEL = ModelConfig.from_dict(tiny_config(num_layers=2, hidden=64, max_len=2048))


def test_blocks_are_copied_in_every_layer() -> None:
    """Keys and values of the source block appear in the destination, all else stays."""
    cache = KVCache(MODEL, 5, 16, torch.bfloat16)
    for layer in cache.layers:
        assert layer.data_ptr() % 64 == 0
        assert not layer.any()
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in cache.layers]

    cache.copy_blocks(((1, 3), (0, 4)))

    for layer, old in zip(cache.layers, before, strict=True):
        blocks, old_blocks = layer.view(2, 5, -1), old.view(2, 5, -1)
        assert torch.equal(blocks[:, [0, 1, 2, 3, 4]], old_blocks[:, [0, 1, 2, 1, 0]])


def test_a_large_cache_costs_nothing_until_it_is_written() -> None:
    """32 GiB of KV are zero pages, not memory: the plan may give KV what others may never use."""
    cache = KVCache(MODEL, 1 << 22, 16, torch.float32)

    assert float(cache.layers[1][1, -1].sum()) == 0.0
