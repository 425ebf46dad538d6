"""bench/peers.py without its peers: what is compared, and what is drawn."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.peers import WrongOutput, check, draw, verdict
from bench.workloads import WORKLOADS, Contestant, Goal


def test_every_token_is_nearly_the_best() -> None:
    """Near ties may go either way, and further where weights are quantised; one token that is worse stops the bench."""
    exact, coarse = Contestant("chorus"), Contestant("chorus", options=(("quantization", "int4"),))

    assert check("x", exact, [[0.0, 0.2], [0.4, 0.0]]) == 0.4
    assert check("x", coarse, [[0.0, 0.2], [0.6, 0.0]]) == 0.6
    for shortfall in (0.6, float("nan")):
        with pytest.raises(WrongOutput, match="row 1, token 0"):
            check("x", exact, [[0.0, 0.2], [shortfall, 0.0]])


def test_verdicts_pair_the_rounds() -> None:
    """The median of ratios or differences within rounds, not a ratio of medians."""
    figures = {"a": [10.0, 40.0, 90.0], "b": [5.0, 10.0, 30.0]}

    assert verdict(Goal("a", "b", at_least=3.0), figures)["ratio"] == 3.0
    assert verdict(Goal("a", "b", at_least=3.1), figures)["holds"] is False
    assert verdict(Goal("a", "b", at_most=30.0), figures)["more_ms"] == 30.0


def test_every_workload_is_fair() -> None:
    """All engines of a workload get the same prompts and lengths; rows are spread evenly over the adapters."""
    for workload in WORKLOADS.values():
        assert workload.prompts(1) == workload.prompts(1) != workload.prompts(2)
        for goal in workload.goals:
            assert {goal.who, goal.than} <= set(workload.contestants)
            assert (goal.at_least is None) != (goal.at_most is None)
        for contestant in workload.contestants.values():
            counts = [workload.rows(contestant).count(index) for index in range(contestant.used)]
            assert len(set(counts)) <= 1


def test_the_plot_shows_speed_and_share(tmp_path: Path) -> None:
    """One line per engine in both charts, from what was measured."""
    reports = {
        name: {"figures": {"Chorus": 400.0 - number, "vLLM-CPU": 300.0 - 5 * number}}
        for name, number in (("base", 0), ("1-adapter", 1), ("32-adapters", 32))
    }
    draw(tmp_path / "plot.svg", reports)

    lines = [each for each in ElementTree.parse(tmp_path / "plot.svg").iter() if each.tag.endswith("polyline")]
    assert len(lines) == 4
    assert all(len(line.attrib["points"].split()) == 3 for line in lines)
