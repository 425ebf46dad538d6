"""bench/adapters.py runs: what it measures is there, and its plot can be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import adapters


def test_the_report_is_whole(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part at toy size: adapters were loaded and evicted, each number of adapters has its figures."""
    plot = tmp_path / "plot.svg"
    monkeypatch.setattr(
        sys, "argv",
        ["adapters", "--model", str(tiny_llama), "--dtype", "float32", "--adapters", "12", "--resident", "6",
         "--rows", "2", "--requests", "24", "--length", "4", "--segments", "2", "--counts", "2,12",
         "--lengths", "2", "6", "--rate", "20", "--seconds", "0.3", "--loads", "2", "--cycles", "10",
         "--plot", str(plot)],
    )  # fmt: skip
    adapters.main()
    report: dict[str, Any] = {}
    for line in capsys.readouterr().out.splitlines():
        report |= json.loads(line)

    assert report["zipf"]["requests"] == 24
    assert report["zipf"]["evictions"] <= report["zipf"]["loads"]
    assert set(report["arrivals"]) == {"2", "12"}
    assert report["arrivals"]["2"]["within_limit"] == 1.0
    assert set(report["cost"]) == {"16", "256", "4096"}
    assert len(report["rhythm"]["longest_gap_ms"]) == 2
    assert report["churn"]["extent_bytes"] == report["churn"]["stored"] == 0
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
