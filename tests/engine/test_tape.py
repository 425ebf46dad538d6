"""Recorded steps give the bits that the same steps give when every operation is called, whatever changes in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
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
from engine.ops.native_plan import NativePlan, Segment
from engine.ops.room import Room
from engine.ops.tape import Tape
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


@pytest.fixture
def two_threads() -> Iterator[None]:
    OPS.set_threads(2)
    yield
    OPS.set_threads(torch.get_num_threads())


@pytest.mark.parametrize(
    ("max_rows", "least_part"), [(64, 1000), (64, 1), (0, 1)], ids=["kept", "kept-in-parts", "in-parts"]
)
@pytest.mark.parametrize("base", ["biased", "qwen3"])
@pytest.mark.usefixtures("two_threads")
def test_a_recorded_step_is_the_step(
    base: str, max_rows: int, least_part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with adapters and norms of heads, while contexts, rows and adapters of the batch change; whether all
    threads share each operation, or each has rows of its own, of a step that is recorded for later ones or is too
    large for that."""
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

    monkeypatch.setattr(OPS, "least_part", least_part)
    monkeypatch.setattr(tapes, "MAX_ROWS", max_rows)
    recorded = decode(model, config, bank)
    monkeypatch.setattr(OPS, "least_part", 1000)
    monkeypatch.setattr(tapes, "MAX_ROWS", 0)
    called = decode(model, config, bank)

    assert all(torch.equal(*pair) for pair in zip(recorded, called, strict=True))


@pytest.mark.usefixtures("two_threads")
def test_equal_parts_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one shape run at the same time, each in memory of its own."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=2))
    model = load_model(tmp_path, config, OPS)
    rows = [make_sequence([3 + row] * 20, [2 * row, 2 * row + 1]) for row in range(8)]
    batch = build_batch(step_of([Part(row, 0, 6) for row in rows]), None, BLOCK_SIZE)
    found = []
    for min_part in (1, 1000):
        monkeypatch.setattr(OPS, "least_part", min_part)
        found.append(model.forward(batch, KVCache(config, 16, BLOCK_SIZE, OPS.weight_dtype)).clone())

    assert torch.equal(*found)


@pytest.mark.usefixtures("two_threads")
def test_attention_waits_for_the_keys(tmp_path: Path) -> None:
    """However long a part takes to write them, the one behind it that goes on with its sequence reads them."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=1))
    slow = OPS.pack_linear(torch.randn(512, 512))
    x, (q_TND, k_TKD, v_TKD) = torch.randn(2048, 512), (
        torch.randn(2, heads, config.head_dim) for heads in (config.num_heads, *[config.num_kv_heads] * 2)
    )  # fmt: skip
    plan, slots_T = plan_of([2], [2], []), torch.tensor([0, 1])
    wanted_cache, cache = (KVCache(config, 4, BLOCK_SIZE, OPS.weight_dtype).layers[0].zero_() for _ in range(2))
    first, second = Tape(Room(keeps=True)), Tape(Room(keeps=True))
    with OPS.recording(first):
        kept = OPS.linear(x, slow)
        OPS.write_kv(k_TKD, v_TKD, cache, slots_T)
    with OPS.recording(second):
        small = OPS.rms_norm(x[:1], torch.ones(512), 1e-5), OPS.rms_norm(x[:1], torch.ones(512), 1e-5)
        found = OPS.attention(q_TND, cache, plan, 1.0, None)
    OPS.run_all([(bytes(each.rows), each.num_rows, each is second) for each in (first, second)])

    OPS.write_kv(k_TKD, v_TKD, wanted_cache, slots_T)
    assert torch.equal(found, OPS.attention(q_TND, wanted_cache, plan, 1.0, None))
    assert (kept.shape, len(small)) == ((2048, 512), 2)


def plan_of(lengths: list[int], contexts: list[int], segments: list[tuple[int, int]]) -> NativePlan:
    starts_S = np.cumsum([0, *lengths[:-1]])
    arrays = (starts_S, np.array(lengths), np.array(contexts), np.arange(2 * len(lengths)).reshape(-1, 2))
    made = (Segment * len(segments))(*(Segment(*each, 7 + i, 9) for i, each in enumerate(segments)))
    return NativePlan(sum(lengths), arrays, made, 4)


def test_parts_of_a_batch() -> None:
    """Even in what they cost, between sequences where that is about as even; each part counts its tokens, and those of
    its adapters, from 0."""
    first, second = plan_of([1, 1, 4, 1, 1, 1, 3], [9, 9, 4, 9, 9, 9, 3], [(5, 8), (8, 12)]).cut(2)

    assert (first.tokens, second.tokens) == (slice(0, 6), slice(6, 12))
    assert [first.waits, second.waits] == [False, False]
    assert [each.tolist() for each in first.plan.arrays] == [[0, 1, 2], [1, 1, 4], [9, 9, 4], [[0, 1], [2, 3], [4, 5]]]
    assert [each.tolist() for each in second.plan.arrays[:3]] == [[0, 1, 2, 3], [1, 1, 1, 3], [9, 9, 9, 3]]
    assert [(each.start, each.end, each.arena) for each in first.plan.segments] == [(5, 6, 7)]
    assert [(each.start, each.end, each.arena) for each in second.plan.segments] == [(0, 2, 7), (2, 6, 8)]


def test_a_sequence_in_parts() -> None:
    """Who goes on with a sequence waits for the part before; its earlier tokens have seen less context."""
    first, second, third = plan_of([2, 90, 4], [9, 190, 9], [(2, 92)]).cut(3)
    sizes = [part.plan.num_tokens for part in (first, second, third)]

    assert sum(sizes) == 96
    assert max(sizes) - min(sizes) < 5
    assert [part.waits for part in (first, second, third)] == [False, True, True]
    assert [each.tolist() for each in first.plan.arrays[:3]] == [[0, 2], [2, sizes[0] - 2], [9, 100 + sizes[0] - 2]]
    assert [each.tolist() for each in second.plan.arrays] == [[0], [sizes[1]], [100 + sum(sizes[:2]) - 2], [[2, 3]]]
    assert [each.tolist() for each in third.plan.arrays[:3]] == [[0, sizes[2] - 4], [sizes[2] - 4, 4], [190, 9]]
    assert [(each.start, each.end) for each in third.plan.segments] == [(0, sizes[2] - 4)]


def test_uneven_parts_are_not_made() -> None:
    """One token can't be divided."""
    plan = plan_of([1] * 8, [10] * 7 + [20_000], [])

    (part,) = plan.cut(2)
    assert (part.tokens, part.plan, part.waits) == (slice(0, 8), plan, False)


@pytest.mark.parametrize(("num_threads", "num_parts"), [(1, 1), (2, 2), (3, 1)])
def test_few_rows_are_not_divided(num_threads: int, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPS, "least_part", 6)
    OPS.set_threads(num_threads)
    try:
        parts = OPS.parts(plan_of([1] * 12, [64] * 12, []))
    finally:
        OPS.set_threads(torch.get_num_threads())

    assert len(parts) == num_parts


def test_recordings_are_few(tmp_path: Path) -> None:
    """Batches of ever new shapes don't pile up recordings."""
    config = ModelConfig.from_dir(tiny_model(tmp_path, num_layers=1))
    model = load_model(tmp_path, config, OPS)
    cache = KVCache(config, 128, BLOCK_SIZE, OPS.weight_dtype)
    for length in range(1, 61):
        batch = build_batch(step_of([Part(make_sequence([1] * length, [0, 1, 2, 3]), 0, length)]), None, BLOCK_SIZE)
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
