"""Recorded steps give the bits that the same steps give when every operation is called, whatever changes in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import load_model
from engine.ops import tape as tapes
from engine.ops.native import NativeOps
from tests.engine.forward import BLOCK_SIZE, Part, make_sequence, random_adapter, step_of
from tests.engine.peft_cases import make_base
from tests.tiny import tiny_model

OPS = NativeOps()


def decode(model: Transformer, config: ModelConfig, bank: LoraBank) -> list[Tensor]:
    """Logits of 40 steps of five rows: contexts grow past a table's width, adapters change, rows come and go."""
    cache = KVCache(config, 128, BLOCK_SIZE, OPS.weight_dtype)
    rows = [make_sequence([3 + row] * 240, list(range(24 * row, 24 * row + 24)), name)
            for row, name in enumerate((None, "a", "a", "b", None))]  # fmt: skip
    found = []
    for step in range(40):
        there = [row for index, row in enumerate(rows) if (step < 20) != (index in (1, 4)) or index in (0, 2)]
        parts = [Part(row, 230 - 3 * index + step, 231 - 3 * index + step) for index, row in enumerate(there)]
        for part in parts:
            part.sequence.tokens.extend([step] * (part.end - len(part.sequence.tokens)))
        if step == 0:
            parts = [Part(part.sequence, 0, part.end) for part in parts]
        batch = build_batch(step_of(parts), bank, BLOCK_SIZE)
        with torch.inference_mode():
            found.append(model.logits(model.forward(batch, cache), batch, torch.arange(batch.num_tokens))[-5:].clone())
    return found


@pytest.mark.parametrize("base", ["biased", "qwen3"])
def test_a_recorded_step_is_the_step(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with adapters and norms of heads, while contexts, rows and adapters of the batch change."""
    path = make_base(tmp_path / base, base)
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, OPS)
    bank = LoraBank(config.base_shape(), 1 << 22, OPS.adapter_dtype)
    for seed, name in enumerate("ab"):
        ranks = {
            (layer, module): 4 + 4 * seed
            for layer in range(config.num_layers)
            for module in ("q_proj", "up_proj", "down_proj")
        }
        bank.place(name, random_adapter(config.base_shape(), ranks, seed, dtype=torch.bfloat16))

    recorded = decode(model, config, bank)
    monkeypatch.setattr(tapes, "MAX_ROWS", 0)
    called = decode(model, config, bank)

    assert all(torch.equal(*pair) for pair in zip(recorded, called, strict=True))


def test_recordings_are_few(tmp_path: Path) -> None:
    """Batches of ever new shapes don't pile up recordings."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=1))
    model = load_model(tmp_path, config, OPS)
    cache = KVCache(config, 128, BLOCK_SIZE, OPS.weight_dtype)
    for length in range(1, 40):
        batch = build_batch(step_of([Part(make_sequence([1] * length, [0, 1, 2]), 0, length)]), None, BLOCK_SIZE)
        model.forward(batch, cache)

    (replay,) = model._replays.values()
    assert len(replay._recordings) == tapes.MAX_TAPES  # type: ignore[attr-defined]


def test_a_step_leaves_torch_threads_alone(tmp_path: Path) -> None:
    """Indexing by a tensor wakes them for a few rows already, and they turn for milliseconds on the cores that the
    operations behind it compute on."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=1))
    model = load_model(tmp_path, config, OPS)
    cache = KVCache(config, 4, BLOCK_SIZE, OPS.weight_dtype)
    batch = build_batch(step_of([Part(make_sequence([1, 2, 3], [0]), 0, 3)]), None, BLOCK_SIZE)
    with torch.profiler.profile() as profile:
        model.logits(model.forward(batch, cache), batch, torch.tensor([2]))

    names = {event.key for event in profile.key_averages()}
    assert "aten::index" not in names
    assert "aten::index_select" in names
