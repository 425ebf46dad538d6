"""Fixtures of tests/gateway: a running gateway on SQLite and Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.live import Live, serve


@pytest.fixture
async def live(tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str) -> AsyncIterator[Live]:
    """The whole application with a fake engine, on a real socket."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url) as running:
        yield running
