"""HostMemory: blocks go to the host and come back as they were; every kind of ops has a layout of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorus import LLM
from engine.cost_model import CostModel
from engine.kv_cache import KVCache
from engine.kv_host import HostMemory
from engine.kv_setup import kv_layout
from engine.model.config import ModelConfig
from engine.ops import create_ops
from engine.ops.reference import ReferenceOps
from tests.tiny import tiny_config

MODEL = ModelConfig.from_dict(tiny_config(num_layers=3, hidden=64, max_len=2048))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_go_there_and_back(dtype: torch.dtype) -> None:
    """Keys and values of every layer, to any slot and into any block; all other blocks and slots stay; speeds are
    told."""
    cache = KVCache(MODEL, 6, 16, dtype)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape))
    told: list[tuple[int, float]] = []
    host = HostMemory(cache, 4, lambda num_bytes, seconds: told.append((num_bytes, seconds)))
    before = [layer.clone().view(2, 6, -1) for layer in cache.layers]

    host.store([(1, 3), (5, 0)])
    for layer in cache.layers:
        layer.view(2, 6, -1)[:, [1, 5]] = 0
    host.load([(0, 2), (3, 5)])
    host.load([])

    for layer, old in zip(cache.layers, before, strict=True):
        new = layer.view(2, 6, -1)
        assert torch.equal(new[:, [0, 2, 3, 4, 5]], old[:, [0, 5, 3, 4, 1]])
        assert not new[:, 1].any()
    assert not host.slots_SL2C[[1, 2]].any()
    assert [num_bytes for num_bytes, _ in told] == [2 * host.slot_bytes] * 2


def test_a_view_is_the_memory_of_a_slot() -> None:
    """What is written to a view is what is loaded."""
    cache = KVCache(MODEL, 2, 16, torch.bfloat16)
    host = HostMemory(cache, 2, lambda num_bytes, seconds: None)
    view = host.view(1)
    assert len(view) == host.slot_bytes == 3 * 2 * 16 * 2 * 16 * 2
    view[:] = b"\x40" * len(view)
    host.load([(1, 0)])

    for layer in cache.layers:
        assert (layer.view(2, 2, -1)[:, 0] == 3.0).all()
        assert not layer.view(2, 2, -1)[:, 1].any()


def test_all_speeds_are_measured_at_start(tiny_llama: Path, tmp_path: Path) -> None:
    """Whether copying or computing is quicker is known before the first request, and so is what the disk can do."""
    options: dict[str, Any] = {"kv_memory": "1MiB", "kv_host_bytes": "1MiB", "adapter_memory": "1MiB"}
    with LLM(tiny_llama, dtype="float32", max_model_len=256, kv_disk_dir=tmp_path / "kv", **options) as llm:
        speeds = llm._core.stats("").speeds
    guessed = CostModel(1, 1, copy_speed=1e9, compute_speed=1e3)

    assert set(speeds) == {"copy_bytes", "disk_bytes", "prefill_tokens"}
    assert speeds["copy_bytes"] != guessed.copy_speed
    assert speeds["prefill_tokens"] != guessed.compute_speed
    assert speeds["disk_bytes"] != guessed.disk_speed
    assert not list((tmp_path / "kv").glob("*/*.kv"))


def test_layouts_are_told_apart() -> None:
    """The native operations keep a block in another order than torch's; the same ops always say the same; another
    number of layers is another layout."""
    cache = KVCache(MODEL, 2, 16, torch.bfloat16)
    native, plain = create_ops("cpu", torch.bfloat16, 16, 16), ReferenceOps(torch.bfloat16)
    deeper = ModelConfig.from_dict(tiny_config(num_layers=4, hidden=64, max_len=2048))

    assert kv_layout(native, cache) == kv_layout(native, cache)
    assert kv_layout(plain, cache) != kv_layout(native, cache)
    assert kv_layout(plain, KVCache(deeper, 2, 16, torch.bfloat16)) != kv_layout(plain, cache)
