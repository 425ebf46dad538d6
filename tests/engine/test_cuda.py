"""The CUDA path without a card: Triton's interpreter computes what the kernels say, its compiler makes what cards run.

Each check is a process of its own, as Triton decides at import whether kernels are interpreted; what they promise is
said in tests/engine/cuda/. And what needs no kernel: which cards are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.memory_plan import plan_memory
from engine.model.config import ModelConfig
from engine.ops import create_ops
from engine.ops.cards import check_capability, check_head_dim

pytest.importorskip("triton", reason="Triton has no build for this system")

ROOT = Path(__file__).parents[2]
LIMIT_S = 1200


def check(name: str, interpreted: bool) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-s", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/engine/cuda/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "name", ["check_kernels", "check_attention", "check_integers", "check_tables", "check_model", "check_graphs"]
)
def test_interpreted(name: str) -> None:
    """Each kernel equals float64, and a whole model and engine over them equal plain torch."""
    check(name, interpreted=True)


@pytest.mark.timeout(1300)
def test_compiled() -> None:
    """Each kernel compiles for the supported cards at the shapes of Llamas, fits their memory and spills nothing."""
    check("check_compile", interpreted=False)


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_the_benchmark_runs_to_its_end(tmp_path: Path) -> None:
    """bench/gpu.py finds no wrong kernel and has a figure, and a floor of bytes, for every row that it promises."""
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.gpu", "--toy", "--json", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in json.loads(path.read_text()) if row["part"] != "check"]
    assert len([row for row in rows if row["part"] == "engine"]) == 9
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)


def test_the_benchmark_needs_only_the_engine() -> None:
    """It can be carried to a machine that has torch, Triton and msgspec: it loads no server, no database, no link."""
    code = "import sys, bench.gpu.__main__; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    unwanted = {"gateway", "tenants", "zmq", "fastapi", "pydantic", "sqlalchemy", "redis", "transformers", "peft"}

    assert not unwanted & set(loaded.split())


def test_older_cards_are_refused_by_name() -> None:
    """A card before Ampere is refused with its name and what would do; Ampere and later are not."""
    with pytest.raises(ConfigError, match=r"Tesla T4 \(compute capability 7.5\) is too old.*--device cpu"):
        check_capability("Tesla T4", (7, 5))
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        check_capability("a card", capability)


@pytest.mark.parametrize("head_dim", [8, 17, 320])
def test_heads_without_a_tile_are_refused(head_dim: int) -> None:
    """A head size that attention can't do is refused at start, not at the first request."""
    with pytest.raises(ConfigError, match=f"head size {head_dim}"):
        check_head_dim(head_dim)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_machine_without_a_card(tiny_llama: Path) -> None:
    """Asked for a card, a machine without one refuses, before it reads a weight, and names what would do."""
    with pytest.raises(ConfigError, match=r"device cuda:1: no CUDA device.*--device cpu"):
        plan_memory(EngineConfig(model=tiny_llama, device="cuda:1"), ModelConfig.from_dir(tiny_llama))
    with pytest.raises(ConfigError, match="no CUDA device"):
        create_ops("cuda", torch.bfloat16, 64, 16)
