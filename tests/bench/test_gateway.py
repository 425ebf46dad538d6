"""bench/gateway.py runs: real workers, Redis, SQLite, the engine's real socket; every figure is there."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from bench import gateway
from tests.services import missing


async def test_every_measurement_is_reported(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests all succeed, events are counted, and each part's CPU time is there and adds up."""
    if shutil.which("redis-server") is None:
        missing("redis-server")
    options = argparse.Namespace(
        model=tiny_llama, workers=1, connections=4, seconds=0.5, database="", soak=0.5, floor=0.1, litellm=""
    )

    assert await gateway.measure(options) == 0

    found = {line["bench"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(found) == ["plain", "half", "direct", "added", "own_half", "burst", "stream", "rss", "soak"]
    assert set(found["direct"]["statuses"]) == {"200"}
    assert found["added"]["p50_ms"] == pytest.approx(found["half"]["p50_ms"] - found["direct"]["p50_ms"], abs=0.02)
    for name in ("plain", "half", "own_half", "burst", "stream"):
        assert set(found[name]["statuses"]) == {"200"}
        costs = found[name]["cpu_ms"]
        assert set(costs) == {"client", "gateway", "redis", "engine", "sum"}
        assert costs["sum"] == pytest.approx(sum(costs.values()) - costs["sum"], abs=0.001)
        assert costs["gateway"] > 0
    for name in ("burst", "stream"):
        line = found[name]
        assert line["events_per_s"] > 60 * line["requests_per_s"], "64 tokens, and what surrounds them"
    assert len(found["soak"]["mb"]) == 11
