"""Fixtures of tests/e2e: running servers for the tests that leave them as they were, and what they must say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from engine.llm import LLM
from engine.memory_plan import adapter_bytes, block_bytes
from engine.model.config import ModelConfig
from tests.e2e.callers import Oracle
from tests.e2e.process import ChorusProcess
from tests.services import missing

FP32 = 4
CRAMPED_RANK = 8
CRAMPED_LEN = 512


def needs_redis() -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server")


@pytest.fixture(scope="session")
def serving(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChorusProcess]:
    """`chorus serve` of the tiny model with two workers, ready; tests make tenants of their own."""
    needs_redis()
    data_dir = tmp_path_factory.mktemp("serving")
    with ChorusProcess("serve", str(tiny_llama), "--workers", "2", "--dtype", "float32", data_dir=data_dir) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def cramped(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChorusProcess]:
    """The same with room for two adapters of the largest rank, and KV for 40 blocks: little more than one request of
    the maximum length."""
    import torch

    needs_redis()
    shape = ModelConfig.from_dir(tiny_llama)
    options = {
        "--workers": 2, "--dtype": "float32", "--max-lora-rank": CRAMPED_RANK, "--max-model-len": CRAMPED_LEN,
        "--adapter-memory": 2 * adapter_bytes(shape, CRAMPED_RANK, FP32),
        "--kv-memory": 40 * block_bytes(shape, 16, torch.float32),
    }  # fmt: skip
    flags = [str(part) for option in options.items() for part in option]
    with ChorusProcess("serve", str(tiny_llama), *flags, data_dir=tmp_path_factory.mktemp("cramped")) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> Iterator[Oracle]:
    """The tiny model offline, in fp32."""
    with LLM(tiny_llama, dtype="float32", kv_memory="64MiB", adapter_memory="64MiB") as llm:
        yield Oracle(llm)


_numbers = count(1)


@pytest.fixture
def tenant() -> str:
    """An id that no other test has."""
    return f"tenant-{next(_numbers)}"
