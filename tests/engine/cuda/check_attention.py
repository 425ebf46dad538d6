"""Paged attention and the write of keys and values under Triton's interpreter, against naive loops. Run by
test_cuda.py, in a process of its own."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.kv_cache import zeros
from engine.ops.cards import Card
from engine.ops.cuda import CudaOps
from engine.ops.launch import AttentionShape
from tests.engine.test_ops import SPANS, attention_batch, naive_attention

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_cuda.py"

OPS = CudaOps(torch.float32, 16, Card(2, programs_each=2, options={}))
LONG = pytest.mark.long


@pytest.mark.parametrize("num_processors", [1, 24])
@pytest.mark.parametrize("window", [None, pytest.param(7, marks=LONG), pytest.param(16, marks=LONG), 50])
@pytest.mark.parametrize("spans", SPANS)
def test_attention(spans: str, window: int | None, num_processors: int) -> None:
    """Decodes of any lengths, first and later chunks in one batch, with and without sliding window; with contexts
    whole (few processors) and in parts (many)."""
    draw = torch.Generator().manual_seed(2)
    batch = attention_batch(SPANS[spans])
    q = torch.randn(batch.num_tokens, 6, 16, generator=draw)
    cache = torch.randn(2, 512 * 16, 2, 16, generator=draw)
    wanted = naive_attention(q, cache, batch, batch.positions_T.tolist(), 0.25, window)
    ops = CudaOps(torch.float32, 16, Card(num_processors, programs_each=2, options={}))

    got = ops.attention(q, cache, ops.plan(batch), 0.25, window)

    assert (got - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (7, 1, 24), (40, 2, 16), (2, 1, 160)])
def test_attention_of_any_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Groups of any size, heads of sizes that are no power of two."""
    draw = torch.Generator().manual_seed(3)
    batch = attention_batch([(0, 9), (40, 41), (16, 40)])
    q = torch.randn(batch.num_tokens, heads, head_dim, generator=draw)
    cache = torch.randn(2, 512 * 16, kv_heads, head_dim, generator=draw)
    wanted = naive_attention(q, cache, batch, batch.positions_T.tolist(), 0.25, None)

    assert (OPS.attention(q, cache, OPS.plan(batch), 0.25, None) - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_context_among_short_ones(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where contexts may be long, they are cut into parts though rows alone occupy the card; short ones have keys in
    the first parts only, and what lies in the memory of the others does not matter."""
    monkeypatch.setattr("engine.ops.launch.LONG_PART", 256)
    one_processor = Card(1, programs_each=2, options={})
    assert AttentionShape.of_decodes(3, 16, 10, 712, one_processor) == AttentionShape(16, 128, 4, 4, 2, 1)
    assert AttentionShape.of_decodes(3, 16, 10, 256, one_processor).parts == 1
    batch = attention_batch(SPANS["lengths far apart"])
    q, cache = torch.randn(batch.num_tokens, 6, 16), torch.randn(2, 512 * 16, 2, 16)
    ops = CudaOps(torch.float32, 16, one_processor)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: torch.full(*sized(args), torch.nan, **options))

    got = ops.attention(q, cache, ops.plan(batch), 0.25, window)

    monkeypatch.undo()
    assert (got - naive_attention(q, cache, batch, batch.positions_T.tolist(), 0.25, window)).abs().max() <= 1e-5


def sized(args: tuple[object, ...]) -> tuple[object, ...]:
    """torch.empty takes a size as several numbers, torch.full as one tuple."""
    return args if isinstance(args[0], tuple) else (args,)


def test_long_contexts_have_parts() -> None:
    """128 rows of 8 KV heads on a card of 132 processors: one part up to 4,096 keys, then more; with 512 rows, as many
    as memory allows."""
    card = Card(132)
    parts = [AttentionShape.of_decodes(4, 128, 1024, keys, card).parts for keys in (4096, 8192, 32768, 131072)]

    assert parts == [1, 2, 8, 16]
    assert AttentionShape.of_decodes(4, 128, 4096, 131072, card).parts == 4
    assert AttentionShape.of_decodes(4, 128, 8, 2048, card).parts == 32


def test_a_cache_of_more_than_two_billion_numbers() -> None:
    """Keys, values and blocks that lie beyond 2³¹ elements are found, in both directions: an offset of 32 bits would
    come out elsewhere. (Pages that nobody writes take no memory.)"""
    num_slots = (1 << 31) // 16 + 64
    cache = zeros((2, num_slots, 1, 16), torch.float16)
    assert cache.stride(0) > 1 << 31
    ops = CudaOps(torch.float16, 16, Card(2, programs_each=2, options={}))
    k, v, q = (torch.randn(20, 1, 16).half() for _ in range(3))
    last = num_slots // 16 - 1
    slots = torch.cat((torch.arange(last * 16, last * 16 + 16), torch.arange(4)))
    ops.write_kv(k, v, cache, slots)
    ints = [np.array(values, np.int64) for values in ([0], [20], [20], [[last, 0]])]
    on_device = torch.zeros(20, dtype=torch.int64)
    batch = ForwardBatch(on_device, on_device, slots, *ints, 16, on_device, (1,))

    got = ops.attention(q, cache, ops.plan(batch), 0.25, None)

    assert torch.equal(cache[0, slots], k)
    assert torch.equal(cache[1, slots], v)
    scores = (q[:, 0].float() @ k[:, 0].float().t() * 0.25).masked_fill(torch.ones(20, 20).triu(1) > 0, -torch.inf)
    assert (got - scores.softmax(-1) @ v[:, 0].float()).abs().max() <= 5e-3
