"""Part 2: how near is each kernel to its floor, and what would one do without it?"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.bench import Bench, Record
from bench.gpu.clock import seconds_of
from bench.gpu.inputs import BLOCK_SIZE, filled_bank, lora_batch, qkv_slices, rows_of
from engine.batch import ForwardBatch, build_batch
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.ops import LoraSlices
from engine.quantization import Quantization
from engine.step import Step


def kernels(bench: Bench) -> list[Record]:
    """Batched LoRA of q, k and v in every layer, so that no cache holds what is read; attention; products."""
    num_rows = bench.workloads[0][0]
    group = min(128, bench.config.hidden_size // 2)
    kinds = (None, Quantization(8, group), Quantization(4, group))
    records = [dense(bench, rows, kind) for rows in (1, num_rows, bench.prompt_tokens) for kind in kinds]
    for num_adapters in (1, 8, 32):
        if num_adapters <= num_rows:
            records.append(lora_time(bench, num_rows, num_adapters, 1))
    records.append(lora_time(bench, 1, 1, bench.prompt_tokens))
    for rows, context, _ in bench.workloads:
        records.append(attention_time(bench, rows, context, 1))
    records.append(attention_time(bench, 1, bench.prompt_tokens, bench.prompt_tokens))
    return records


def dense(bench: Bench, num_rows: int, quantization: Quantization | None = None) -> Record:
    """The base's own product beside which all others stand, or that of its weights in 8 or 4 bits."""
    outputs, hidden = qkv_slices(bench.config)[-1][2], bench.config.hidden_size
    num_layers = bench.config.num_layers
    weights = [bench.ops.pack_linear(bench.random(outputs, hidden), quantization) for _ in range(num_layers)]
    x = bench.random(num_rows, hidden)
    seconds = seconds_of(lambda: [bench.ops.linear(x, weight) for weight in weights], bench.device, bench.num_repeats)
    itemsize = bench.dtype.itemsize
    num_bytes = outputs * hidden * itemsize if quantization is None else quantization.num_bytes(outputs, hidden)
    num_bytes += num_rows * (hidden + outputs) * itemsize
    floor = max(num_bytes / bench.bytes_s, 2 * num_rows * outputs * hidden / bench.flop_s)
    kind = "base" if quantization is None else f"{quantization.name} in groups of {quantization.group},"
    return Record("kernels", f"{kind} qkv, {num_rows} rows", 1e3 * seconds / num_layers, 1e3 * floor)


def lora_time(bench: Bench, num_rows: int, num_adapters: int, num_tokens: int) -> Record:
    rank, slices, num_layers = 16, qkv_slices(bench.config), bench.config.num_layers
    hidden, width = bench.config.hidden_size, slices[-1][2]
    bank = filled_bank(bench, [rank] * num_adapters)
    batch = lora_batch(bench, bank, num_rows, num_adapters, num_tokens)
    x, y = bench.random(batch.num_tokens, hidden), bench.random(batch.num_tokens, width)
    plan = bench.ops.plan(batch)
    bench.ops.lora(y, x, plan, 0, slices)  # makes the work list, which all layers share

    def ours() -> None:
        for layer in range(num_layers):
            bench.ops.lora(y, x, plan, layer, slices)

    seconds = seconds_of(ours, bench.device, bench.num_repeats) / num_layers
    weights = num_adapters * rank * (3 * hidden + width) * bench.dtype.itemsize
    activations = batch.num_tokens * (hidden + 2 * width) * bench.dtype.itemsize
    floor = max(
        (weights + activations) / bench.bytes_s, 2 * batch.num_tokens * rank * (3 * hidden + width) / bench.flop_s
    )
    baselines = {"loop": 1e3 * loop_time(bench, bank, batch, x, y, slices)}
    grouped = grouped_time(bench, batch, x, num_adapters, rank)
    if grouped is not None:
        baselines["grouped GEMM"] = 1e3 * grouped
    name = f"lora qkv, {num_rows} rows of {num_tokens}, {num_adapters} adapters"
    return Record("kernels", name, 1e3 * seconds, 1e3 * floor, baselines=baselines)


def loop_time(
    bench: Bench, bank: LoraBank, batch: ForwardBatch, x: Tensor, y: Tensor, slices: LoraSlices
) -> float:  # fmt: skip
    """Two products for each adapter and module."""

    def launch() -> None:
        for layer in range(bench.config.num_layers):
            for segment in batch.segments:
                rows = slice(segment.start, segment.end)
                for module, first, end in slices:
                    part = bank.pair(segment.slot, layer, module)
                    assert part is not None
                    assert part.a_HR is not None
                    assert part.b_RO is not None
                    y[rows, first:end] += x[rows] @ part.a_HR @ part.b_RO

    return seconds_of(launch, bench.device, max(1, bench.num_repeats // 10)) / bench.config.num_layers


def grouped_time(bench: Bench, batch: ForwardBatch, x: Tensor, num_adapters: int, rank: int) -> float | None:
    """torch's grouped product over adapters stacked in one tensor, padded to one rank: A, then B. None where torch has
    none for this device and dtype."""
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None or bench.device == "cpu":
        return None
    hidden, width = bench.config.hidden_size, qkv_slices(bench.config)[-1][2]
    num_layers = bench.config.num_layers
    a, b = (
        [bench.random(num_adapters, *sizes) for _ in range(num_layers)]
        for sizes in ((hidden, 3 * rank), (3 * rank, width))
    )
    ends = torch.tensor([segment.end for segment in batch.segments], dtype=torch.int32, device=bench.device)

    def launch() -> None:
        for a_layer, b_layer in zip(a, b, strict=True):
            grouped(grouped(x, a_layer, offs=ends), b_layer, offs=ends)

    try:
        return seconds_of(launch, bench.device, bench.num_repeats) / num_layers
    except RuntimeError as error:
        print(f"no grouped product here: {str(error).splitlines()[0]}")
        return None


def attention_time(bench: Bench, num_rows: int, context: int, num_tokens: int) -> Record:
    config, ops = bench.config, bench.ops
    num_blocks = num_rows * -(-context // BLOCK_SIZE)
    cache = KVCache(replace(config, num_layers=4), num_blocks, BLOCK_SIZE, bench.dtype, bench.device)
    batch = build_batch(Step(rows_of(num_rows, context, num_tokens, 0)), None, BLOCK_SIZE, bench.device)
    plan = ops.plan(batch)
    q = bench.random(batch.num_tokens, config.num_heads, config.head_dim)
    scale = config.head_dim**-0.5
    ops.attention(q, cache.layers[0], plan, scale, None)  # uploads the plan

    def ours() -> None:
        for layer in cache.layers:
            ops.attention(q, layer, plan, scale, None)

    seconds = seconds_of(ours, bench.device, bench.num_repeats) / 4
    kv_bytes = 2 * num_rows * context * config.kv_size * bench.dtype.itemsize
    products = 4 * config.q_size * num_rows * num_tokens * (context - (num_tokens - 1) / 2)
    floor = max((kv_bytes + 2 * q.nbytes) / bench.bytes_s, products / bench.flop_s)
    baselines = {"torch's, keys gathered before": 1e3 * gathered_time(bench, num_rows, context, num_tokens)}
    name = f"attention, {num_rows} rows, {num_tokens} of {context}"
    return Record("kernels", name, 1e3 * seconds, 1e3 * floor, baselines=baselines)


def gathered_time(bench: Bench, num_rows: int, context: int, num_tokens: int) -> float:
    """torch's attention over keys and values that lie densely: what it would be without pages."""
    config = bench.config
    q = bench.random(num_rows, config.num_heads, num_tokens, config.head_dim)
    k, v = (bench.random(num_rows, config.num_kv_heads, context, config.head_dim) for _ in range(2))
    is_causal = num_tokens > 1
    return seconds_of(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True), bench.device,
        bench.num_repeats,
    )  # fmt: skip
