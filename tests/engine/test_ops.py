"""Ops against naive loops: batched LoRA under every popularity of adapters, paged attention, and the small ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adapters.spec import LINEARS, BaseShape
from engine.batch import ForwardBatch, build_batch
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.ops import KV_LIMIT, LoraSlices, Ops
from engine.ops.cpu import CpuOps
from engine.ops.reference import ReferenceOps
from tests.engine.forward import BLOCK_SIZE, Part, make_sequence, random_adapter, step_of
from tests.tiny import tiny_config

CONFIG = ModelConfig.from_dict(tiny_config(num_layers=2, hidden=64))
SHAPE: BaseShape = CONFIG.base_shape()
RANKS = (1, 2, 4, 8, 16, 64)
QKV: LoraSlices = ((0, 0, 64), (1, 64, 96), (2, 96, 128))
OPS = [ReferenceOps(torch.float32), CpuOps(torch.float32)]
by_ops = pytest.mark.parametrize("ops", OPS, ids=["reference", "cpu"])


def popularity(kind: str, num_rows: int, num_adapters: int) -> list[str | None]:
    """Adapter of each row: all one, all different, uniform with base rows, or Zipf (exponent 1) with base rows."""
    draw = torch.Generator().manual_seed(3)
    if kind == "identical":
        return ["a0"] * num_rows
    if kind == "distinct":
        return [f"a{row % num_adapters}" for row in range(num_rows)]
    weights = torch.ones(num_adapters + 1) if kind == "uniform" else 1 / torch.arange(1, num_adapters + 2)
    picks = torch.multinomial(weights, num_rows, replacement=True, generator=draw).tolist()
    return [f"a{pick - 1}" if pick else None for pick in picks]


def filled_bank(num_adapters: int, dtype: torch.dtype = torch.float32) -> LoraBank:
    """Adapters of mixed ranks and mixed targets: a{i} lacks module i modulo 7."""
    bank = LoraBank(SHAPE, 1 << 24, dtype)
    for index in range(num_adapters):
        ranks = {
            (layer, name): RANKS[(index + layer + position) % len(RANKS)]
            for layer in range(SHAPE.num_layers)
            for position, name in enumerate(LINEARS)
            if position != index % len(LINEARS)
        }
        bank.place(f"a{index}", random_adapter(SHAPE, ranks, seed=index, dtype=dtype))
    return bank


def batch_of(adapters: list[str | None], lengths: list[int], bank: LoraBank) -> ForwardBatch:
    parts = [
        Part(make_sequence([1] * length, [2 * row, 2 * row + 1], adapter), 0, length)
        for row, (adapter, length) in enumerate(zip(adapters, lengths, strict=True))
    ]
    return build_batch(step_of(parts), bank, BLOCK_SIZE)


def naive_lora(y: Tensor, x: Tensor, batch: ForwardBatch, bank: LoraBank, layer: int, slices: LoraSlices) -> Tensor:
    """One token, one module, one matrix-vector product at a time."""
    out = y.clone()
    slot_of = {t: segment.slot for segment in batch.segments for t in range(segment.start, segment.end)}
    for token, slot in slot_of.items():
        for module, first, end in slices:
            pair = bank.pair(slot, layer, module)
            if pair is not None:
                out[token, first:end] += pair[1].float().t() @ (pair[0].float().t() @ x[token])
    return out


@by_ops
@pytest.mark.parametrize("shape", ["decode", "mixed"])
@pytest.mark.parametrize("kind", ["identical", "distinct", "uniform", "zipf"])
def test_lora_equals_the_naive_loop(ops: Ops, kind: str, shape: str) -> None:
    """Mixed ranks, targets and base rows in one batch, whatever the popularity: what a loop over tokens gives, and
    base rows untouched bit for bit (SC-07, AL-06)."""
    bank = filled_bank(8)
    adapters = popularity(kind, 24, 8)
    lengths = [1] * 24 if shape == "decode" else [1 + 5 * (row % 4) for row in range(24)]
    batch = batch_of(adapters, lengths, bank)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch.num_tokens, 64, generator=draw)
    y = torch.randn(batch.num_tokens, 128, generator=draw)
    wanted = naive_lora(y, x, batch, bank, 1, QKV)

    got = y.clone()
    ops.lora(got, x, ops.plan(batch), 1, QKV)

    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    num_base = batch.segments[0].start if batch.segments else batch.num_tokens
    assert num_base == sum(n for a, n in zip(adapters, lengths, strict=True) if a is None)
    assert torch.equal(got[:num_base], y[:num_base])
    assert not torch.equal(got[num_base:], y[num_base:])


@by_ops
def test_lora_leaves_modules_that_an_adapter_lacks(ops: Ops) -> None:
    """AL-06: an adapter of k only adds exactly zero to q and v."""
    bank = LoraBank(SHAPE, 1 << 20, torch.float32)
    bank.place("k", random_adapter(SHAPE, {(0, "k_proj"): 4}, seed=1))
    batch = batch_of(["k", None], [3, 2], bank)
    y, x = torch.randn(5, 128), torch.randn(5, 64)
    got = y.clone()

    ops.lora(got, x, ops.plan(batch), 0, QKV)

    assert torch.equal(got[:, :64], y[:, :64])
    assert torch.equal(got[:, 96:], y[:, 96:])
    assert not torch.equal(got[2:, 64:96], y[2:, 64:96])


def naive_attention(
    q: Tensor, cache: Tensor, batch: ForwardBatch, positions: list[int], scale: float, window: int | None
) -> Tensor:
    """One token and one head at a time, keys looked up one by one through the block table."""
    out = torch.empty_like(q)
    num_groups = q.shape[1] // cache.shape[2]
    rows = [row for row, length in enumerate(batch.lengths_S.tolist()) for _ in range(length)]
    for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        slots = [
            int(batch.tables_SB[row][p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, position + 1)
        ]
        for head in range(q.shape[1]):
            keys, values = cache[0, slots, head // num_groups], cache[1, slots, head // num_groups]
            out[token, head] = (keys @ q[token, head] * scale).softmax(0) @ values
    return out.flatten(1)


def attention_batch(spans: list[tuple[int, int]]) -> ForwardBatch:
    """Rows that compute positions [start, end) each; their blocks lie scattered and in no order."""
    blocks = torch.randperm(512, generator=torch.Generator().manual_seed(1)).tolist()
    parts = []
    for start, end in spans:
        count = -(-end // BLOCK_SIZE)
        taken, blocks = blocks[:count], blocks[count:]
        parts.append(Part(make_sequence([1] * end, taken), start, end))
    return build_batch(step_of(parts), None, BLOCK_SIZE)


SPANS = {
    "decodes": [(0, 1), (15, 16), (16, 17), (99, 100), (31, 32)],
    "lengths far apart": [(0, 1), (700, 701), (40, 41), (690, 691), (129, 130)],
    "chunks": [(0, 5), (0, 32), (17, 40), (600, 640)],
    "mixed": [(0, 40), (80, 81), (16, 17), (5, 38), (300, 301)],
}


@by_ops
@pytest.mark.parametrize("window", [None, 7, 16, 50])
@pytest.mark.parametrize("spans", SPANS)
def test_attention_equals_the_naive_loop(ops: Ops, spans: str, window: int | None) -> None:
    """Decodes of any lengths, first and later chunks in one batch, with and without sliding window."""
    draw = torch.Generator().manual_seed(2)
    batch = attention_batch(SPANS[spans])
    q = torch.randn(batch.num_tokens, 6, 16, generator=draw)
    cache = torch.randn(2, 512 * BLOCK_SIZE, 2, 16, generator=draw)
    wanted = naive_attention(q, cache, batch, batch.positions_T.tolist(), 0.25, window)

    got = ops.attention(q, cache, ops.plan(batch), 0.25, window)

    assert (got - wanted).abs().max() <= 1e-5


@by_ops
def test_an_overflow_stays_with_its_owner(ops: Ops) -> None:
    """A sequence that wrote NaN and Inf into its blocks changes no bit of the answer of whoever gets a block next, and
    none of a neighbour in the same padded batch."""
    k = torch.randn(40, 2, 16)
    poison = torch.full((32, 2, 16), math.nan)
    poison[::2] = math.inf
    q = torch.randn(2, 6, 16)
    sequences = [make_sequence([1] * 18, [0, 1]), make_sequence([1] * 3, [2])]
    batch = build_batch(step_of([Part(s, s.num_tokens - 1, s.num_tokens) for s in sequences]), None, BLOCK_SIZE)
    answers = []
    for is_poisoned in (False, True):
        cache = torch.zeros(2, 4 * BLOCK_SIZE, 2, 16)
        if is_poisoned:
            for start in (0, 32):
                ops.write_kv(poison, poison, cache, torch.arange(start, start + 32))
        ops.write_kv(k[:21], k[19:40], cache, torch.cat((torch.arange(18), torch.arange(32, 35))))
        assert cache.isfinite().all()
        assert cache.abs().max() <= KV_LIMIT
        answers.append(ops.attention(q, cache, ops.plan(batch), 0.25, None))

    assert torch.equal(answers[0], answers[1])


@by_ops
def test_norms_and_activation_follow_their_equations(ops: Ops) -> None:
    """rms_norm, add_rms_norm, silu_mul, linear: the formulas of Ops in float64."""
    x, residual, weight = torch.randn(5, 48) * 9, torch.randn(5, 48), torch.randn(48)
    matrix, bias = torch.randn(20, 48), torch.randn(20)

    def norm(value: Tensor) -> Tensor:
        value = value.double()
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    both, added = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)

    assert torch.allclose(ops.rms_norm(x, weight, 1e-5).double(), norm(x), atol=1e-5)
    assert torch.equal(added, residual + x)
    assert torch.allclose(both.double(), norm(added), atol=1e-5)
    gate, up = x.double().chunk(2, -1)
    assert torch.allclose(ops.silu_mul(x).double(), gate * gate.sigmoid() * up, atol=1e-4)
    packed = ops.pack_linear(matrix)
    assert torch.allclose(ops.linear(x, packed), x @ matrix.t(), atol=1e-3)
    assert torch.allclose(ops.linear(x, packed, bias), x @ matrix.t() + bias, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 40])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_sixteen_bit_weights_give_the_same_product(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_packed: bool, dtype: torch.dtype
) -> None:
    """Also on a CPU whose oneDNN has no 16-bit products, the product is that of the 16-bit weights up to rounding."""
    if not is_packed:
        monkeypatch.setattr("engine.ops.cpu.has_onednn", lambda dtype: False)
    ops = CpuOps(dtype)
    x, matrix, bias = torch.randn(num_tokens, 64), torch.randn(96, 64).to(dtype), torch.randn(96)

    got = ops.linear(x, ops.pack_linear(matrix), bias)

    wanted = x @ matrix.float().t() + bias
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
