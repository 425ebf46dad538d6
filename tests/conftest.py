"""Fixtures for every test: the demo checkpoint, a tiny one, and the real Redis and PostgreSQL of tests/services.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiny import tiny_adapter, tiny_model

pytest_plugins = ("tests.services", "tests.buckets")
ROOT = Path(__file__).parent.parent
DEMO_MODEL = ROOT / "data" / "models" / "smollm2-135m-instruct"
IS_CI = os.environ.get("CI", "") not in ("", "0", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests run with CI=true, or when they are chosen by `-m long`."""
    if IS_CI:
        return
    for item in items:
        if "long" in item.keywords and "long" not in item.config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; runs with CI=true or -m long"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo base model's directory."""
    if not (DEMO_MODEL / "model.safetensors").is_file():
        message = "no demo checkpoint: run `chorus pull smollm2-135m-instruct`"
        pytest.fail(message) if IS_CI else pytest.skip(message)
    return DEMO_MODEL


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a real tokenizer; read only."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_lora(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """An adapter of rank 4 over all linears of `tiny_llama`; read only."""
    return tiny_adapter(tmp_path_factory.mktemp("adapters") / "tiny-lora", tiny_llama)
