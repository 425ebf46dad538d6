"""plan_memory divides what is there, or names the setting that fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.memory_plan import MemoryPlan, adapter_bytes, block_bytes, plan_memory
from engine.model.config import ModelConfig
from tests.tiny import tiny_config

MODEL = ModelConfig.from_dict(tiny_config(num_layers=2, hidden=64, max_len=2048))
BLOCK = block_bytes(MODEL, 16, torch.float32)
ADAPTER = adapter_bytes(MODEL, 64, 4)
GIB = 1 << 30


def plan(available_bytes: int = 4 * GIB, **settings: Any) -> MemoryPlan:
    config = EngineConfig(**{"model": Path("tiny"), "device": "cpu", "dtype": "float32", **settings})
    return plan_memory(config, MODEL, available_bytes)


def test_the_default_plan_fits_and_says_so() -> None:
    """Parts sum to less than what is there, KV holds at least one whole request, and the plan prints them."""
    made = plan()

    parts = made.weights_bytes + made.workspace_bytes + made.adapter_bytes + made.kv_bytes
    assert parts <= made.available_bytes
    assert made.kv_bytes == made.num_blocks * BLOCK
    assert made.num_blocks * 16 >= made.max_model_len == 2048
    assert f"{made.num_blocks * 16} tokens" in str(made)
    assert "requests of 2048 tokens" in str(made)


def test_explicit_sizes_are_kept() -> None:
    """KV and adapter memory are what was asked; without --max-model-len the length is what KV can hold."""
    made = plan(kv_memory_bytes=40 * BLOCK + 7, adapter_memory_bytes=ADAPTER)

    assert (made.num_blocks, made.kv_bytes, made.adapter_bytes) == (40, 40 * BLOCK, ADAPTER)
    assert made.max_model_len == 640


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"max_model_len": 4096}, "max_model_len"),
        ({"kv_memory_bytes": 8 * BLOCK, "max_model_len": 512}, "kv_memory_bytes"),
        ({"kv_memory_bytes": 8 * BLOCK, "max_model_len": 512}, "max_model_len"),
        ({"kv_memory_bytes": 1}, "kv_memory_bytes"),
        ({"kv_memory_bytes": 99 * GIB}, "kv_memory_bytes"),
        ({"adapter_memory_bytes": ADAPTER // 4}, "adapter_memory_bytes"),
        ({"adapter_memory_bytes": ADAPTER // 4}, "max_lora_rank"),
        ({"kv_host_bytes": 99 * GIB}, "kv_host_bytes"),
        ({"kv_host_bytes": 1}, "kv_host_bytes"),
        ({"kv_host_bytes": 0, "swap": "on"}, "kv_host_bytes"),
        ({"kv_host_bytes": 0, "kv_disk_dir": Path("kv")}, "kv_host_bytes"),
    ],
)
def test_what_cannot_fit_is_refused_with_what_does(settings: dict[str, Any], option: str) -> None:
    """The refusal names a value of a setting, and with that value the plan holds."""
    with pytest.raises(ConfigError) as refusal:
        plan(**settings)

    flag = "--" + (option if option == "kv_host_bytes" else option.removesuffix("_bytes")).replace("_", "-")
    advice = str(refusal.value).rpartition("use")[2]
    if flag == "--max-model-len" and flag not in advice:
        number = re.search(r"(\d+)", advice)
    elif flag in advice:
        number = re.search(rf"{flag} (\d+)", advice)
    else:
        number = re.search(r"(\d+)$", advice)
    assert number, str(refusal.value)
    plan(**{**settings, option: int(number.group(1))})


def test_host_memory_for_kv_is_planned() -> None:
    """On the CPU there is none unless something needs it, and then it is taken from what is free, in whole blocks."""
    assert plan().host_kv_bytes == 0
    for settings in ({"swap": "on"}, {"kv_disk_dir": Path("kv")}, {"kv_host_bytes": 100 * BLOCK + 5}):
        made = plan(**settings)
        assert made.host_kv_bytes > 0
        assert made.host_kv_bytes % BLOCK == 0
        parts = made.weights_bytes + made.workspace_bytes + made.adapter_bytes + made.kv_bytes + made.host_kv_bytes
        assert parts <= made.available_bytes
        assert "on the host" in str(made)
    assert plan(kv_host_bytes=100 * BLOCK + 5).host_kv_bytes == 100 * BLOCK


def test_a_model_that_leaves_nothing_is_refused() -> None:
    """Too little memory for weights and one block is an error at start, not a crash under load."""
    with pytest.raises(ConfigError, match="no memory for KV"):
        plan(available_bytes=1 << 20)


@pytest.mark.parametrize("device", ["tpu", "cuda:0"])
def test_devices_that_are_not_there_are_refused(device: str) -> None:
    """A device that this machine lacks is named in the error."""
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with pytest.raises(ConfigError, match=device):
        plan(device=device)
