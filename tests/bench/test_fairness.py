"""bench/fairness.py runs: what it measures is there, and its plot can be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import fairness


def test_the_report_is_whole(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Solo, fair at each load, first come first served, inversion and weights, with the verdict on each claim."""
    plot = tmp_path / "plot.svg"
    monkeypatch.setattr(
        sys, "argv",
        ["fairness", "--model", str(tiny_llama), "--dtype", "float32", "--rows", "2", "--requests", "4",
         "--loads", "2,4", "--seconds", "0.5", "--limit", "3", "--plot", str(plot)],
    )  # fmt: skip
    fairness.main()
    report = json.loads(capsys.readouterr().out)

    assert report["solo"]["requests"] == 4
    assert set(report["fair"]) == {"2x", "4x"}
    assert set(report["weights"]) == {"1", "2", "4"}
    assert set(report["holds"]) == {"light_within_5_times_solo", "load_does_not_matter", "service_by_weight"}
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
