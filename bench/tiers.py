"""KV tiers: how long a known prompt takes to its first token, by where its blocks lie. A line of JSON per tier.

    python -m bench.tiers [--tokens 512] [--prompts 6] [--model DIR] [--tiers device,host,disk]

Prompts are sent one after another, and then again: what doesn't fit into the device has gone to the host by then; for
the disk, the engine is started anew in between. Files just written lie in the page cache: a disk's own latency is
not in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.throughput import DEMO_MODEL
from chorus import LLM, SamplingParams
from engine.memory_plan import block_bytes
from engine.model.config import ModelConfig

BLOCK = 16


def measure(tier: str, options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Milliseconds of the first time and of the second, medians, and how many tokens were known at the second."""
    config = ModelConfig.from_dir(options.model)
    one = (options.tokens // BLOCK + 4) * block_bytes(config, BLOCK, torch.bfloat16)
    every = (2 * options.prompts + 2) * one
    draw = random.Random(0)
    prompts = [[draw.randrange(100, config.vocab_size) for _ in range(options.tokens)] for _ in range(options.prompts)]

    def start() -> LLM:
        return LLM(
            options.model, dtype="bfloat16", max_num_seqs=2, max_model_len=options.tokens + 32, swap="auto",
            kv_memory=every if tier == "device" else one, kv_host_bytes=0 if tier == "device" else every,
            kv_disk_dir=Path(directory) if tier == "disk" else None,
        )  # fmt: skip

    with ExitStack() as stack:
        llm = stack.enter_context(start())
        computed_ms, _ = send(llm, prompts)
        if tier == "disk":
            send(llm, [[7] * options.tokens, [8] * options.tokens])  # so that the last prompt leaves the device, too
            llm.close()
            llm = stack.enter_context(start())
        again_ms, cached = send(llm, prompts)
    return {"computed_ms": computed_ms, "again_ms": again_ms, "cached_tokens": cached}


def send(llm: LLM, prompts: list[list[int]]) -> tuple[float, int]:
    """(median ms to the first token, median of the tokens that were known), after one of others."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([prompts[0][::-1][:64]], params)
    times, cached = [], []
    for prompt in prompts:
        start = time.perf_counter()
        cached.append(llm.generate([prompt], params)[0].num_cached_tokens)
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 1), int(statistics.median(cached))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tiers", default="device,host,disk")
    options = parser.parse_args()
    for tier in options.tiers.split(","):
        with tempfile.TemporaryDirectory(prefix="chorus-tiers-") as directory:
            report = measure(tier, options, directory)
        print(json.dumps({"bench": "tiers", "model": options.model.name, "tier": tier} | report), flush=True)


if __name__ == "__main__":
    main()
