"""`chorus demo`: what a person sees first."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.process import ChorusProcess, is_running
from tests.tiny import tiny_adapter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("examples")
    for seed, name in enumerate(("pirate", "support")):
        tiny_adapter(root / name, tiny_llama, seed=seed, strength=3)
        (root / name / "prompt.txt").write_text("# what to ask\nHow are you?\nWhere is my order?\n")
    return root


def test_once_shows_who_asked_what_and_leaves_nothing(tiny_llama: Path, adapters: Path) -> None:
    """`--once`: two tenants with keys, two adapters, base and both adapters asked at the same time, tokens/s; then the
    server is gone."""
    with ChorusProcess("demo", "--once", "--adapters", str(adapters), CHORUS_MODEL=str(tiny_llama)) as demo:
        assert demo.wait_line(r"ready: http").process.poll() is None
        children = list(demo.children())
        assert demo.wait_end(120) == 0

    rows = re.findall(r"^ *(acme|globex) +(\S+)", demo.output, re.MULTILINE)
    assert {tenant for tenant, _ in rows} == {"acme", "globex"}
    assert {model for _, model in rows} == {"tiny-llama", "pirate", "support"}
    assert ("globex", "pirate") not in rows
    assert len(set(re.findall(r"key (chorus_live_\S+)", demo.output))) == 2
    assert re.search(r"\d+ tokens in [\d.]+ s = \d+ tokens/s", demo.output)
    assert not [pid for pid in children if is_running(pid)]


def test_it_goes_on_and_comes_back(tiny_llama: Path, adapters: Path) -> None:
    """Without `--once` it keeps running, and its curl lines are right; a second start takes over."""
    arguments = ("demo", "--adapters", str(adapters))
    with ChorusProcess(*arguments, CHORUS_MODEL=str(tiny_llama)) as demo:
        demo.wait_line(r"The server keeps running")
        url, key, body = re.findall(
            r"curl (\S+/chat/completions) -H 'Authorization: Bearer (\S+)' \\\n.* -d '(.*)'", demo.output
        )[0]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        assert httpx.post(url, content=body, headers=headers, timeout=60).status_code == 200
        demo.process.terminate()
        assert demo.wait_end() == 0

    with ChorusProcess(*arguments, "--once", data_dir=demo.data_dir, CHORUS_MODEL=str(tiny_llama)) as again:
        assert again.wait_end(120) == 0
        assert "admin key" not in again.output
        assert re.search(r"\d+ tokens/s", again.output)


@pytest.mark.demo_model
@pytest.mark.long
def test_the_real_one(demo_model: Path) -> None:
    """The demo model and the adapters of examples/: each answer sounds like its adapter."""
    with ChorusProcess("demo", "--once", CHORUS_MODEL=str(demo_model), OMP_NUM_THREADS="2") as demo:
        assert demo.wait_end(280) == 0

    assert {model for _, model in re.findall(r"^ *(acme|globex) +(\S+)", demo.output, re.MULTILINE)} == {
        demo_model.name, "pirate", "support",
    }  # fmt: skip
