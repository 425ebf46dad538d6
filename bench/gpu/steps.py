"""Part 3: what do adapters cost an engine? Decode steps through the runner."""

from __future__ import annotations

import time

import torch

from bench.gpu.bench import Bench, Record
from bench.gpu.inputs import BLOCK_SIZE, MIXED_RANKS, filled_bank, random_model, rows_of
from engine.kv_cache import KVCache
from engine.model.transformer import Transformer
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.step import Step


def steps(bench: Bench) -> list[Record]:
    model = random_model(bench.config, bench.ops, bench.device, bench.config.num_layers)
    records = []
    for num_rows, context, counts in bench.workloads:
        num_blocks = num_rows * -(-context // BLOCK_SIZE)
        if not fits(bench, num_blocks, max(counts)):
            records.append(Record("engine", f"{num_rows} rows × {context}: does not fit this card"))
            continue
        cache = KVCache(bench.config, num_blocks, BLOCK_SIZE, bench.dtype, bench.device)
        base_ms = 0.0
        for ranks in ([], *([16] * n for n in counts), [MIXED_RANKS[i % 4] for i in range(counts[-1])]):
            record = step_time(bench, model, cache, (num_rows, context), ranks, base_ms)
            base_ms = base_ms or record.ms or 0.0
            records.append(record)
            print(record, flush=True)
    return records


def fits(bench: Bench, num_blocks: int, num_adapters: int) -> bool:
    if bench.device == "cpu":
        return True
    config, itemsize = bench.config, bench.dtype.itemsize
    kv = 2 * config.num_layers * num_blocks * BLOCK_SIZE * config.kv_size * itemsize
    adapters = num_adapters * config.num_layers * 30 * sum(map(sum, config.linears.values())) * itemsize
    return kv + adapters + (3 << 30) < torch.cuda.mem_get_info()[0]


def step_time(
    bench: Bench, model: Transformer, cache: KVCache, size: tuple[int, int], ranks: list[int], base_ms: float
) -> Record:  # fmt: skip
    """Greedy decode steps of the runner, from a Step to tokens on the host."""
    num_rows, context = size
    bank = filled_bank(bench, ranks) if ranks else None
    runner = ModelRunner(model, cache, bank, Sampler(()), bench.device)
    step = Step(rows_of(num_rows, context, 1, len(ranks)))
    for _ in range(2):
        runner.run(step)
    times = []
    for _ in range(bench.num_repeats):
        start = time.perf_counter()
        runner.run(step)
        times.append(time.perf_counter() - start)
    ms = 1e3 * sorted(times)[len(times) // 2]
    base_bytes, adapter_bytes = step_bytes(bench, num_rows, context, ranks)
    floor_ms = 1e3 * (base_bytes + adapter_bytes) / bench.bytes_s
    label = "base" if not ranks else f"{len(ranks)} adapters, rank {'16' if set(ranks) == {16} else 'mixed'}"
    kept, most = (base_ms / ms, base_bytes / (base_bytes + adapter_bytes)) if ranks else (None, None)
    return Record(
        "engine", f"{num_rows} rows × {context}, {label}", ms, floor_ms, 1e3 * num_rows / ms, kept, most
    )  # fmt: skip


def step_bytes(bench: Bench, num_rows: int, context: int, ranks: list[int]) -> tuple[int, int]:
    """What a decode step must read: weights and keys and values; adapters."""
    config, itemsize = bench.config, bench.dtype.itemsize
    linears = config.num_layers * sum(outputs * inputs for outputs, inputs in config.linears.values())
    keys_and_values = 2 * config.num_layers * num_rows * context * config.kv_size
    base = (linears + config.vocab_size * config.hidden_size + keys_and_values) * itemsize
    adapters = config.num_layers * sum(map(sum, config.linears.values())) * sum(ranks) * itemsize
    return base, adapters
