"""Part 1: is every kernel right? Each against float64 on the same inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.bench import Bench, Record
from bench.gpu.inputs import BLOCK_SIZE, MIXED_RANKS, filled_bank, lora_batch, qkv_slices, rows_of, table_adapter
from engine.batch import Segment, build_batch
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.ops.integer_weights import integer_weight
from engine.ops.sampling import choose
from engine.quantization import Quantization
from engine.sampler import choose_on_host
from engine.step import Step


def error_of(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


def checks(bench: Bench) -> list[Record]:
    found = row_errors(bench)
    for name, spans in {"decode": [(1, 250), (1, 37)], "chunks": [(40, 40), (17, 90)]}.items():
        for window in (None, 48):
            label = f"write_kv and attention, {name}" + (f", window {window}" if window else "")
            found[label] = attention_error(bench, spans, window)
    for num_adapters, num_tokens in ((1, 1), (5, 1), (3, 20), (1, 600)):
        found[f"lora, {num_adapters} adapters, {num_tokens} tokens each"] = lora_error(bench, num_adapters, num_tokens)
    for kind in (Quantization(8, 32), Quantization(4, 32)):
        for num_tokens in (5, 200):
            found[f"{kind.name} linear, {num_tokens} tokens"] = integer_error(bench, kind, num_tokens)
    found |= table_errors(bench)
    found["draws that differ"] = draw_error(bench)
    return [Record("check", name, error=error) for name, error in found.items()]


def row_errors(bench: Bench) -> dict[str, float]:
    """Of what treats each row by itself."""
    ops, config, hidden = bench.ops, bench.config, bench.config.hidden_size
    x, residual, weight = bench.random(33, hidden), bench.random(33, hidden), bench.random(hidden)

    def norm(value: Tensor) -> Tensor:
        wide = value.double()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    added = (x.double() + residual.double()).to(bench.dtype)
    gate_up = bench.random(33, 2 * config.intermediate_size)
    gate, up = gate_up.double().chunk(2, -1)
    heads = bench.random(33, config.num_heads, config.head_dim)
    angles = torch.rand(33, config.head_dim // 2, device=bench.device, dtype=torch.float64)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    cos, sin = cos.to(bench.dtype), sin.to(bench.dtype)
    cosines, sines = cos.double()[:, None], sin.double()[:, None]
    turned = heads.double() * cosines + heads.double().roll(config.head_dim // 2, -1) * sines
    return {
        "rms_norm": error_of(ops.rms_norm(x, weight, 1e-5), norm(x)),
        "silu_mul": error_of(ops.silu_mul(gate_up), F.silu(gate) * up),
        "rope": error_of(ops.rope(heads, cos, sin), turned),
        "add_rms_norm": error_of(ops.add_rms_norm(x, residual, weight, 1e-5)[0], norm(added)),
    }


def integer_error(bench: Bench, quantization: Quantization, num_tokens: int) -> float:
    """Of the product, beside float64's with the weights as they are kept."""
    config = bench.config
    weight = bench.random(config.q_size + 2 * config.kv_size, config.hidden_size)
    packed = integer_weight(weight, quantization)
    x = bench.random(num_tokens, config.hidden_size)
    return error_of(bench.ops.linear(x, packed), x.double() @ packed.widened().double().t())


def table_errors(bench: Bench) -> dict[str, float]:
    """Of LoRA of both tables for two adapters beside base rows, logits in another order than tokens."""
    config, tables = bench.config, bench.ops.table_lora
    assert tables is not None
    packed = [table_adapter(bench.shape, rank, bench.dtype) for rank in (8, 20)]
    bank = LoraBank(bench.shape, sum(each.size_bytes for each in packed), bench.dtype, bench.device, has_arena=True)
    for index, each in enumerate(packed):
        bank.place(f"a{index}", each)
    segments = [Segment(bank.slot("a0"), 2, 5), Segment(bank.slot("a1"), 5, 6)]
    tokens_T = torch.tensor([3, 1, 7, 7, 90, 2, 5], device=bench.device)
    x = bench.random(7, config.hidden_size)
    order_R = torch.tensor([4, 0, 5, 2], device=bench.device)
    logits = torch.randn(4, config.vocab_size, device=bench.device)
    embedded, wanted_x, wanted = x.clone(), x.double(), logits.double()
    for segment in segments:
        extras = bank.extras(segment.slot)
        assert extras is not None
        for part, is_head in ((extras.embedding, False), (extras.head, True)):
            assert part is not None
            assert part.a is not None
            assert part.b is not None
            a, b, rows = part.a.double(), part.b.double(), slice(segment.start, segment.end)
            if not is_head:
                wanted_x[rows] += a[tokens_T[rows]] @ b.t()
                continue
            own = [place for place, row in enumerate(order_R.tolist()) if segment.start <= row < segment.end]
            wanted[own] += x[order_R[own]].double() @ a.t() @ b.t()
    tables.embed(embedded, tokens_T, segments, bank)
    tables.head(logits, x[order_R], order_R, segments, bank)
    return {"lora of embed_tokens": error_of(embedded, wanted_x), "lora of lm_head": error_of(logits, wanted)}


def draw_error(bench: Bench) -> float:
    """Share of draws that are not those of numpy on the host; where probabilities nearly meet, sums may differ."""
    probs, ids = torch.rand(64, 200, device=bench.device).softmax(-1).sort(-1, descending=True)
    candidates = probs[:, :128].contiguous(), ids[:, :128].contiguous()
    random = np.random.default_rng(0)
    limits = np.array([random.choice([np.inf, 5], 64), random.choice([1.0, 0.3], 64), random.choice([0.0, 0.5], 64)])
    draws = random.random(64)
    chosen = choose(*candidates, limits, draws, False).cpu().numpy()
    wanted = choose_on_host(*candidates, limits, draws, False)
    return float((chosen != wanted).mean())


def attention_error(bench: Bench, spans: list[tuple[int, int]], window: int | None) -> float:
    """Rows of (tokens, context), whose keys and values are written by write_kv before."""
    config, ops = bench.config, bench.ops
    longest = max(context for _, context in spans)
    cache = KVCache(replace(config, num_layers=1), len(spans) * longest, BLOCK_SIZE, bench.dtype, bench.device)
    rows = [rows_of(len(spans), context, tokens, 0)[i] for i, (tokens, context) in enumerate(spans)]
    for index, row in enumerate(rows):
        row.sequence.blocks[:] = range(index * longest, index * longest + len(row.sequence.blocks))
    keys, values = ([bench.random(c, config.num_kv_heads, config.head_dim) for _, c in spans] for _ in range(2))
    for row, key, value in zip(rows, keys, values, strict=True):
        slots = torch.arange(len(key), device=bench.device) + row.sequence.blocks[0] * BLOCK_SIZE
        ops.write_kv(key, value, cache.layers[0], slots)
    batch = build_batch(Step(tuple(rows)), None, BLOCK_SIZE, bench.device)
    q = bench.random(batch.num_tokens, config.num_heads, config.head_dim)
    got = ops.attention(q, cache.layers[0], ops.plan(batch), config.head_dim**-0.5, window)
    wanted, group = [], config.num_heads // config.num_kv_heads
    by_block = {row.sequence.blocks[0]: index for index, row in enumerate(rows)}
    for start, length, table in zip(batch.starts_S, batch.lengths_S, batch.tables_SB, strict=True):
        index = by_block[int(table[0])]
        key, value = (part[index].double().repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("qnd,cnd->nqc", q[start : start + length].double(), key) * config.head_dim**-0.5
        position = torch.arange(len(key) - length, len(key), device=bench.device)[:, None]
        place = torch.arange(len(key), device=bench.device)
        hidden = place > position
        if window is not None:
            hidden |= place <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        wanted.append(torch.einsum("nqc,cnd->qnd", weights, value).flatten(1))
    return error_of(got, torch.cat(wanted))


def lora_error(bench: Bench, num_adapters: int, num_tokens: int) -> float:
    bank = filled_bank(bench, [MIXED_RANKS[index % 4] for index in range(num_adapters)])
    batch = lora_batch(bench, bank, num_adapters, num_adapters, num_tokens)
    slices = qkv_slices(bench.config)
    x, y = bench.random(batch.num_tokens, bench.config.hidden_size), bench.random(batch.num_tokens, slices[-1][2])
    wanted = y.double()
    for segment in batch.segments:
        rows = slice(segment.start, segment.end)
        for module, first, end in slices:
            part = bank.pair(segment.slot, 0, module)
            assert part is not None
            assert part.a_HR is not None
            assert part.b_RO is not None
            wanted[rows, first:end] += x[rows].double() @ part.a_HR.double() @ part.b_RO.double()
    bench.ops.lora(y, x, bench.ops.plan(batch), 0, slices)
    return error_of(y, wanted)
