"""Adapters on embed_tokens and lm_head over the Triton kernels, under Triton's interpreter. Run by test_cuda.py, in a
process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.ops.cards import Card
from engine.ops.cpu import CpuOps
from engine.ops.cuda import CudaOps
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence, step_of
from tests.engine.peft_cases import DORA, NORMS, QV, TABLES, Case, make_adapter, make_base
from tests.engine.test_peft_matrix import Engine

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_cuda.py"

KINDS = {
    "tables": Case("untied", TABLES),
    "dora": Case("untied", TABLES | DORA | {"r": 20}),
    "small": Case("untied", TABLES | {"r": 3}),
    "plain": Case("untied", QV),
    "whole": Case("untied", QV | {"modules_to_save": ["lm_head", "embed_tokens", *NORMS]}),
}
NAMES = [None, "dora", "plain", "tables", "small", "tables", "whole"]


class Recorder:
    """In place of CUDA graphs; counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, launch: Any) -> Any:
        self.count += 1
        launch()
        return launch


def test_tables_of_many_adapters_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA of both tables, with DoRA and biases, ranks of 3 to 20, beside base rows, adapters without tables and whole
    tables, in chunks and decode steps: plain torch's logits, in whatever order rows are asked for. The adapters that
    the kernel takes never reach the loop, and a decode step that changes tables only has its graph."""
    base = make_base(tmp_path / "base", "untied")
    record = Recorder()
    engines = [Engine(base, CudaOps(torch.float32, BLOCK_SIZE, Card(2, 2, options={}), record)),
               Engine(base, CpuOps(torch.float32))]  # fmt: skip
    for name, case in KINDS.items():
        path = make_adapter(tmp_path / name, base, case)
        for engine in engines:
            engine.bank.place(name, engine.load(path))
    found = []
    for engine in engines:
        cache = KVCache(engine.config, 32, BLOCK_SIZE, torch.float32)
        rows = [make_sequence([7 + i, 9, 11 + i], [2 * i], name) for i, name in enumerate(NAMES)]
        parts = [Part(row, 0, 2) for row in rows]
        answers = forward(engine.model, cache, parts, engine.bank)
        batch = build_batch(step_of([Part(row, 2, 3) for row in rows[:-1]]), engine.bank, BLOCK_SIZE)
        hidden = engine.model.forward(batch, cache)
        if engine is engines[0]:
            assert record.count == 1
            monkeypatch.setattr("engine.model.overrides._picked", None)
        order = torch.tensor([3, 0, 5, 1, 2, 4])
        answers.append(engine.model.logits(hidden, batch, order))
        monkeypatch.undo()
        found.append(torch.cat(answers))

    assert (found[0] - found[1]).abs().max() <= 1e-4 * found[1].abs().max()
