"""Decode steps by graph: what GraphReplay keeps and pads, with a recorder that calls the body again in place of a CUDA
graph (a graph is the same launches on the same memory). Kernels are interpreted. Run by test_cuda.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.loader import load
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops.cards import Card
from engine.ops.cuda import CudaOps
from engine.ops.graphs import bucket_size
from engine.ops.reference import ReferenceOps
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.warmup import no_adapter, steps_to_warm, warm_up
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence
from tests.tiny import tiny_adapter

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_cuda.py"

CARD = Card(2, programs_each=2, options={})


def test_buckets() -> None:
    """Each batch size has a bucket that holds it, with little padding, and few buckets serve all."""
    sizes = [bucket_size(rows) for rows in range(1, 513)]

    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert all(size - rows < max(8, rows / 4) for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 32


class Machine:
    """The model on the kernels and on the reference, each with its own cache and adapters; counts recordings."""

    def __init__(self, model_dir: Path, tmp_path: Path) -> None:
        self.recordings = 0
        config = ModelConfig.from_dir(model_dir)
        paths = [
            tiny_adapter(tmp_path / "a", model_dir, seed=1, rank=4),
            tiny_adapter(tmp_path / "b", model_dir, seed=2, rank=24, targets=("q_proj", "down_proj")),
        ]
        ops = CudaOps(torch.float32, BLOCK_SIZE, CARD, self._record)
        self.sides = []
        for each in (ops, ReferenceOps(torch.float32)):
            bank = LoraBank(config.base_shape(), 1 << 22, torch.float32)
            for name, path in zip("ab", paths, strict=True):
                bank.place(name, load(path, config.base_shape(), torch.float32, 64))
            cache = KVCache(config, 48, BLOCK_SIZE, torch.float32)
            self.sides.append((load_model(model_dir, config, each), cache, bank))

    def _record(self, launch):  # type: ignore[no-untyped-def]
        self.recordings += 1
        launch()
        return launch

    def step(self, spans: list[tuple[int, int, str | None]]) -> tuple[list[Tensor], list[Tensor]]:
        """Logits of decode rows, (row, position, adapter) each, by both sides. A row's blocks follow its number."""
        found = []
        for model, cache, bank in self.sides:
            parts = []
            for row, position, adapter in spans:
                tokens = [(7 * row + 3 * p) % 300 + 3 for p in range(position + 1)]
                parts.append(Part(make_sequence(tokens, [2 * row + 1, 2 * row + 2], adapter), position, position + 1))
            found.append(forward(model, cache, parts, bank))
        return found[0], found[1]


def test_decode_steps_by_graph(tiny_llama: Path, tmp_path: Path) -> None:
    """One recording serves every mix of adapters, every context and every batch size of its bucket; base-only steps
    have one that launches nothing for adapters. Rows that a step does not have write nowhere: what they last wrote
    stays as it was."""
    machine = Machine(tiny_llama, tmp_path)
    steps: list[list[tuple[int, int, str | None]]] = [
        [(row, 0, None) for row in range(6)],
        [(row, 1, None) for row in range(5)],
        [(0, 2, "a"), (1, 2, None), (2, 2, "b"), (3, 2, "a"), (4, 2, "b")],
        [(0, 3, "b"), (2, 3, "a"), (5, 1, None), (1, 3, "b"), (3, 3, "a"), (4, 3, "a"), (6, 0, None)],
        [(5, 2, "a"), (6, 1, None), (7, 0, "b"), (4, 4, "a"), (3, 4, None)],
    ]

    for spans in steps:
        got, wanted = machine.step(spans)
        for one, other in zip(got, wanted, strict=True):
            assert (one - other).abs().max() <= 1e-4 * other.abs().max()
        for (_, mine, _), (_, theirs, _) in [machine.sides]:
            for one, other in zip(mine.layers, theirs.layers, strict=True):
                assert (one - other).abs().max() <= 1e-4

    assert machine.recordings == 2


def test_chunks_run_without_a_graph(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a chunk of a prompt is run as it is."""
    machine = Machine(tiny_llama, tmp_path)
    model, cache, bank = machine.sides[0]

    forward(model, cache, [Part(make_sequence([5, 6, 7], [1], "a"), 0, 3)], bank)

    assert machine.recordings == 0


def test_all_sizes_are_recorded_before_the_first_request(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """After warm-up, decode steps of up to the largest number of rows record nothing more, with and without adapters,
    of whatever rank; the bank is as it was."""
    monkeypatch.setattr("engine.warmup.BUDGET_S", 1e9)
    machine = Machine(tiny_llama, tmp_path)
    model, cache, _ = machine.sides[0]
    bank = LoraBank(model.config.base_shape(), 1 << 22, torch.float32)
    runner = ModelRunner(model, cache, bank, Sampler((), model.ops.draw), "cpu")
    assert steps_to_warm(6, 40, 48, BLOCK_SIZE) == [(1, 40), (1, 2), (6, 1), (4, 1), (2, 1), (1, 1)]
    steps = steps_to_warm(2, 20, 48, BLOCK_SIZE)

    assert warm_up(runner, bank, no_adapter(model.config.num_layers, torch.float32), steps, BLOCK_SIZE) == 8

    assert machine.recordings == 4
    assert not bank.used_bytes
    for rows in (2, 1):
        machine.step([(row, 0, None) for row in range(rows)])
        machine.step([(row, 0, "ab"[row % 2]) for row in range(rows)])
    assert machine.recordings == 4


def test_a_start_takes_no_longer_for_it_than_its_budget(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once its time is up, warm-up leaves the other sizes to be captured when they first come, and says so."""
    caplog.set_level("INFO", "engine.warmup")
    monkeypatch.setattr("engine.warmup.BUDGET_S", 1e-9)
    model, cache, bank = Machine(tiny_llama, tmp_path).sides[0]
    runner = ModelRunner(model, cache, bank, Sampler(()), "cpu")

    assert warm_up(runner, bank, no_adapter(2, torch.float32), [(1, 1), (2, 1)], BLOCK_SIZE) in (0, 2)

    assert "captured when they first come" in caplog.text
