"""The fuzzer's harness: sound seeds pass, every finding stays mended, and a brief run finds nothing new."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.spec import AdapterError
from tests.conftest import IS_CI
from tests.e2e.process import clean_environment
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS, run

FINDINGS = Path(__file__).parent / "findings"
NUM_RUNS = 20_000 if IS_CI else 2_000


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_are_understood(target: str) -> None:
    """Fuzzing begins inside the parsers: of every target at least one seed passes whole."""
    passed = 0
    for seed in seeds(target):
        try:
            TARGETS[target](seed)
            passed += 1
        except AdapterError:
            continue

    assert passed >= 2


@pytest.mark.parametrize("path", sorted(FINDINGS.glob("*/*")), ids=lambda path: path.name)
def test_findings_stay_mended(path: Path) -> None:
    """What the fuzzer found once is an error with a code, or fine."""
    run(path.parent.name, path.read_bytes())


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python")
@pytest.mark.parametrize("target", TARGETS)
def test_a_brief_run_finds_nothing(target: str, tmp_path: Path) -> None:
    """AL-20, AL-15, AL-21: coverage-guided, from the seeds on: a result or an AdapterError each time."""
    command = [sys.executable, "-m", "tests.fuzz", target, str(tmp_path / "corpus"), f"-runs={NUM_RUNS}"]
    limits = ["-max_total_time=60", "-timeout=10", "-rss_limit_mb=1024", f"-artifact_prefix={tmp_path}/"]
    # The limit is compared with the peak, and a child begins with its parent's: let that be a shell's, not pytest's.
    through_shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run(
        [*through_shell, *command, *limits], env=clean_environment(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "DONE" in done.stderr
