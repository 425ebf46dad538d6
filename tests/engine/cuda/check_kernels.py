"""The Triton kernels under Triton's interpreter, against float64 and naive loops. Run by tests/engine/test_cuda.py, in
a process of its own: whether a kernel is interpreted is decided when it is defined."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.loader import (
    FLAGS,
    HAS_BIAS,
    HAS_G,
    NUM_FIELDS,
    OFFSET_A,
    OFFSET_B,
    OFFSET_BIAS,
    OFFSET_G,
    RANK,
    UNIT,
    PackedAdapter,
)
from adapters.spec import MODULES, BaseShape
from engine.lora import LoraBank
from engine.ops import LoraSlices
from engine.ops.cards import Card
from engine.ops.cuda import CudaOps
from engine.ops.device_rows import SEGMENT_FIELDS
from engine.ops.lora import BatchedLora
from engine.ops.reference import ReferenceOps
from engine.ops.sampling import choose
from engine.ops.work_list import ITEM_FIELDS, RANK_BLOCK, TILE_FIELDS, WorkList
from engine.sampler import choose_on_host
from tests.engine import test_ops
from tests.engine.test_ops import QKV, SPANS, attention_batch, batch_of, filled_bank, naive_attention, popularity

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_cuda.py"

CARD = Card(2, programs_each=2, options={})
"""Few programs, so that each takes several works, and no option that only the compiler knows."""

OPS = CudaOps(torch.float32, 16, CARD)
LONG = pytest.mark.long


class Adapter:
    """A packed adapter of one layer, with random A and B, and g and c for some modules; and what it is in float64."""

    def __init__(self, widths: dict[int, tuple[int, int]], ranks: dict[int, int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.parts: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        directory = torch.zeros(2, len(MODULES), NUM_FIELDS, dtype=torch.int64)
        pieces: list[Tensor] = []
        offset = 0
        for module, rank in ranks.items():
            outputs, inputs = widths[module]
            fields = directory[0, module]
            fields[RANK] = rank
            flags = (seed + module) % 4
            a, b = torch.randn(rank, inputs, generator=draw), torch.randn(rank, outputs, generator=draw)
            gain = 1 + torch.rand(outputs, generator=draw) if flags & HAS_G else torch.ones(outputs)
            shift = torch.randn(outputs, generator=draw) if flags & HAS_BIAS else torch.zeros(outputs)
            fields[FLAGS] = flags
            for column, value in ((OFFSET_A, a), (OFFSET_B, b / 16), (OFFSET_G, gain), (OFFSET_BIAS, shift)):
                fields[column] = offset // UNIT
                piece = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % UNIT))
                pieces.append(piece)
                offset += piece.numel()
            self.parts[module] = (a.double(), b.double() / 16, gain.double(), shift.double())
        self.packed = PackedAdapter(torch.cat(pieces), directory, 4 * offset, max(ranks.values(), default=0))

    def apply(self, y_O: Tensor, x_H: Tensor, slices: LoraSlices) -> None:
        for module, first, end in slices:
            if module in self.parts:
                a, b, gain, shift = self.parts[module]
                y_O[first:end] = gain * (y_O[first:end] + b.t() @ (a @ x_H)) + shift


def segments_of(spans: list[tuple[int, int, Adapter]]) -> Tensor:
    rows = [
        (first, end, each.packed.buffer.data_ptr(), each.packed.directory.data_ptr(), each.packed.rank)
        for first, end, each in spans
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, SEGMENT_FIELDS)


SLICES: dict[str, LoraSlices] = {
    "qkv": QKV,
    "gate_up": ((4, 0, 80), (5, 80, 160)),
    "o": ((3, 0, 48),),
    "odd widths": ((0, 0, 37), (1, 37, 50), (2, 50, 63)),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize("name", SLICES)
def test_lora_of_any_segments(name: str, seed: int) -> None:
    """Ranks 1 to 256 in one batch, segments of 0, 1 and many tokens in any place, base rows before, between and after
    them, g and c of some modules, modules that an adapter lacks: float64's result, and base rows untouched bit for
    bit."""
    slices = SLICES[name]
    draw = torch.Generator().manual_seed(seed)
    num_inputs = 33 if name == "odd widths" else 48
    widths = {module: (end - first, num_inputs) for module, first, end in slices}
    ranks = [1, 256, 16, 3, 64, 17]
    adapters = [
        Adapter(widths, {m: ranks[(i + m) % 6] for m in widths if len(widths) == 1 or (i + m) % 4}, 7 * i + seed)
        for i in range(6)
    ]
    spans, token = [], int(torch.randint(0, 3, (1,), generator=draw))
    for index, length in enumerate((1, 0, 2, 19, 1, 5)):
        spans.append((token, token + length, adapters[(index + seed) % 6]))
        token += length + int(torch.randint(0, 3, (1,), generator=draw))
    num_tokens = token + 2
    x = torch.randn(num_tokens, num_inputs, generator=draw)
    y = torch.randn(num_tokens, slices[-1][2], generator=draw)
    wanted = y.double()
    for first, end, adapter in spans:
        for row in range(first, end):
            adapter.apply(wanted[row], x[row].double(), slices)
    got = y.clone()

    BatchedLora(torch.float32, CARD)(got, x, WorkList(segments_of(spans), num_tokens, 256, CARD), 0, slices)

    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    is_base = torch.ones(num_tokens, dtype=torch.bool)
    for first, end, _ in spans:
        is_base[first:end] = False
    assert torch.equal(got[is_base], y[is_base])
    assert not torch.equal(got, y)


def test_lora_of_long_segments() -> None:
    """Steps of many tokens take larger tiles: float64's result, with single tokens beside them."""
    widths = {3: (48, 32)}
    adapters = [Adapter(widths, {3: rank}, seed) for seed, rank in enumerate((8, 40))]
    spans = [(5, 400, adapters[0]), (401, 402, adapters[1]), (402, 540, adapters[1]), (541, 542, adapters[0])]
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(545, 32, generator=draw), torch.randn(545, 48, generator=draw)
    wanted = y.double()
    for first, end, adapter in spans:
        for row in range(first, end):
            adapter.apply(wanted[row], x[row].double(), ((3, 0, 48),))

    BatchedLora(torch.float32, CARD)(y, x, WorkList(segments_of(spans), 545, 40, CARD), 0, ((3, 0, 48),))

    assert (y - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("shape", ["decode", "mixed"])
@pytest.mark.parametrize(
    "kind", [pytest.param("identical", marks=LONG), "distinct", pytest.param("uniform", marks=LONG), "zipf"]
)
def test_lora_of_a_batch(kind: str, shape: str) -> None:
    """SC-07, AL-06: whatever the popularity, a batch of the engine gives what a loop over its tokens gives."""
    bank = filled_bank(8)
    adapters = popularity(kind, 24, 8)
    batch = batch_of(adapters, [1] * 24 if shape == "decode" else [1 + 5 * (row % 4) for row in range(24)], bank)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(batch.num_tokens, 64, generator=draw), torch.randn(batch.num_tokens, 128, generator=draw)
    wanted = test_ops.naive_lora(y, x, batch, bank, 1, QKV)
    got = y.clone()

    OPS.lora(got, x, OPS.plan(batch), 1, QKV)

    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    num_base = batch.segments[0].start if batch.segments else batch.num_tokens
    assert torch.equal(got[:num_base], y[:num_base])


def test_the_work_list_is_that_of_a_loop() -> None:
    """Tiles and items of random segments, in their order: as a Python loop lists them, and the counts tell how many."""
    draw = torch.Generator().manual_seed(5)
    for num_segments in (1, 5, 9):
        lengths = torch.randint(0, 40, (num_segments,), generator=draw).tolist()
        ranks = torch.randint(0, 70, (num_segments,), generator=draw).tolist()
        starts = [sum(lengths[:i]) + i for i in range(num_segments)]
        rows = [
            (s, s + n, 1000 + i, 2000 + i, r) for i, (s, n, r) in enumerate(zip(starts, lengths, ranks, strict=True))
        ]
        work = WorkList(torch.tensor(rows, dtype=torch.int64), sum(lengths) + num_segments, max(ranks), CARD)
        tiles, items = [], []
        for first, end, buffer, directory, rank in rows:
            for start in range(first, end, work.tile_rows):
                items += [(len(tiles), block) for block in range(-(-rank // RANK_BLOCK))]
                tiles.append((start, min(work.tile_rows, end - start), buffer, directory))

        assert work.counts.tolist() == [len(tiles), len(items)]
        assert work.max_tiles >= len(tiles)
        assert work.max_items >= len(items)
        assert work.tiles.view(-1, TILE_FIELDS)[: len(tiles)].tolist() == [list(tile) for tile in tiles]
        assert work.items.view(-1, ITEM_FIELDS)[: len(items)].tolist() == [list(item) for item in items]


def test_sums_of_products_are_not_rounded_to_16_bits() -> None:
    """cuBLAS may not add the parts of a sum in 16 bits: every other kernel adds in fp32."""
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


def test_small_ones() -> None:
    """RMSNorm (plain, with residual, over heads of a wider row), rope, SiLU·mul and linear follow their equations."""
    test_ops.test_norms_and_activation_follow_their_equations(OPS)
    reference = ReferenceOps(torch.float32)
    wide = torch.randn(5, 9, 16)
    heads, weight = wide[:, 2:8], torch.randn(16)
    assert torch.allclose(OPS.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5), atol=1e-6)
    for size in (16, 24):
        heads, angles = torch.randn(5, 11, size)[:, 1:10], torch.randn(5, size // 2)
        cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
        assert torch.allclose(OPS.rope(heads, cos, sin), reference.rope(heads, cos, sin), atol=1e-6)
    gate_up = torch.randn(3, 2 * 1100) * 20
    assert torch.allclose(OPS.silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-5)


def test_keys_and_values_are_finite_and_padding_writes_nowhere() -> None:
    """An overflow stays with its owner; a row with slot −1 changes no byte of the cache."""
    test_ops.test_an_overflow_stays_with_its_owner(OPS)
    cache = torch.randn(2, 32, 2, 16)
    before = cache.clone()
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)

    OPS.write_kv(k, v, cache, torch.tensor([5, -1, 17]))

    assert torch.equal(cache[:, [5, 17]], torch.stack((k, v))[:, [0, 2]])
    rest = [slot for slot in range(32) if slot not in (5, 17)]
    assert torch.equal(cache[:, rest], before[:, rest])


def test_sixteen_bits() -> None:
    """In 16 bits the kernels give what the reference gives, up to rounding. (In fp16: Triton's interpreter multiplies
    the bit patterns of bf16.)"""
    dtype = torch.float16
    ops, reference = CudaOps(dtype, 16, CARD), ReferenceOps(torch.float32)
    bank = filled_bank(4, dtype)
    batch = batch_of(["a1", None, "a2", "a1", "a3"], [1, 4, 20, 2, 1], bank)
    x, y = torch.randn(batch.num_tokens, 64).to(dtype), torch.randn(batch.num_tokens, 128).to(dtype)
    wanted = test_ops.naive_lora(y.float(), x.float(), batch, bank, 1, QKV)
    got = y.clone()
    ops.lora(got, x, ops.plan(batch), 1, QKV)
    assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()

    batch = attention_batch(SPANS["mixed"])
    q, cache = torch.randn(batch.num_tokens, 6, 16).to(dtype), torch.randn(2, 512 * 16, 2, 16).to(dtype)
    exact = naive_attention(q.float(), cache.float(), batch, batch.positions_T.tolist(), 0.25, None)
    assert (ops.attention(q, cache, ops.plan(batch), 0.25, None) - exact).abs().max() <= 0.02

    weight = torch.randn(64).to(dtype)
    assert torch.allclose(
        ops.rms_norm(x, weight, 1e-5).float(), reference.rms_norm(x.float(), weight.float(), 1e-5), atol=0.03, rtol=0.02
    )


def test_a_bank_with_an_arena_gives_the_same() -> None:
    """Where adapters lie in an arena, kernels find them after others came, went and were moved."""
    shape: BaseShape = test_ops.SHAPE
    bank = LoraBank(shape, 1 << 20, torch.float32, has_arena=True)
    packed = {f"a{seed}": test_ops.random_adapter(shape, {(0, "q_proj"): 4 + seed, (0, "v_proj"): 2}, seed=seed)
              for seed in range(3)}  # fmt: skip
    for name, adapter in packed.items():
        bank.place(name, adapter)
    bank.evict("a0")
    batch = batch_of(["a2", None, "a1", "a1"], [1, 3, 2, 1], bank)
    x, y = torch.randn(7, 64), torch.randn(7, 128)
    wanted = test_ops.naive_lora(y, x, batch, bank, 0, QKV)

    OPS.lora(y, x, OPS.plan(batch), 0, QKV)

    assert (y - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("is_whole", [False, True])
def test_draws(is_whole: bool) -> None:
    """Tokens by every mix of top-k, top-p and min-p, and the rows that can't be decided, are those that numpy finds on
    the host; equal probabilities are ordered by id."""
    draw = np.random.default_rng(4)
    num_rows, num_candidates = 60, 23
    probs = draw.dirichlet(np.full(40, 0.3), num_rows).astype(np.float32)
    probs[::3] = np.round(probs[::3], 1)  # ties
    probs, ids = torch.from_numpy(probs).sort(-1, descending=True)
    if is_whole:
        num_candidates = 40
    probs, ids = probs[:, :num_candidates].contiguous(), ids[:, :num_candidates].contiguous()
    limits = np.array([
        draw.choice([np.inf, 1, 3, 30], num_rows), draw.choice([1.0, 0.9, 0.3], num_rows),
        draw.choice([0.0, 0.2, 0.9], num_rows),
    ])  # fmt: skip
    draws = draw.random(num_rows)

    got = choose(probs, ids, limits, draws, is_whole)

    wanted = choose_on_host(probs, ids, limits, draws, is_whole)
    assert got.tolist() == wanted.tolist()
    assert is_whole == (wanted.min() >= 0)
