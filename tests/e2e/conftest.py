"""Fixtures of tests/e2e: one running `chorus serve` for the tests that leave it as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import ChorusProcess
from tests.services import missing


@pytest.fixture(scope="session")
def serving(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChorusProcess]:
    """`chorus serve` of the tiny model with two workers, ready; tests make tenants of their own."""
    if shutil.which("redis-server") is None:
        missing("redis-server")
    data_dir = tmp_path_factory.mktemp("serving")
    with ChorusProcess("serve", str(tiny_llama), "--workers", "2", "--dtype", "float32", data_dir=data_dir) as server:
        yield server.wait_ready()
