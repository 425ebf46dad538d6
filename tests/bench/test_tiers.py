"""bench/tiers.py runs: every tier gives a known prompt back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import tiers


def test_every_tier_is_measured(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line per tier, with how long a prompt took when it was new and when it was known."""
    monkeypatch.setattr(sys, "argv", ["tiers", "--model", str(tiny_llama), "--tokens", "64", "--prompts", "2"])
    tiers.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [line["tier"] for line in lines] == ["device", "host", "disk"]
    assert lines[0]["cached_tokens"] == 48
    assert all(line["computed_ms"] > 0 and line["again_ms"] > 0 for line in lines)
