"""Offline throughput: generated tokens per second of one mixed batch, as one line of JSON per repetition.

    python -m bench.throughput [--model DIR] [--requests 32] [--prompt-len 128] [--output-len 128] [--dtype bfloat16]
                               [--adapters N --rank R] [--floor TOK_S]

Prompts are random ids (equal seeds, equal prompts) and outputs have a fixed length: only the engine is measured.
With --adapters N, request i uses adapter i mod N; the adapters are random, over all linears. --floor makes the exit
status 1 when the best repetition is below it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from adapters.spec import AdapterRef, BaseShape
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from chorus import LLM, SamplingParams
from engine.model.config import ModelConfig

DEMO_MODEL = Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct"


def write_adapter(directory: Path, shape: BaseShape, rank: int, seed: int) -> Path:
    """A random adapter over all linears, as peft would save it."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (outputs, inputs) in shape.linears.items():
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{key}.lora_A.weight"] = draw.standard_normal((rank, inputs), np.float32) / inputs**0.5
            tensors[f"{key}.lora_B.weight"] = draw.standard_normal((outputs, rank), np.float32) * 0.02
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(shape.linears)}
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    return directory


def adapters_of(llm: LLM, model: Path, number: int, rank: int) -> list[AdapterRef | None]:
    shape = ModelConfig.from_dir(model).base_shape()
    with tempfile.TemporaryDirectory() as directory:
        return [llm.add_adapter(write_adapter(Path(directory) / str(i), shape, rank, i)) for i in range(number)]


def measure(llm: LLM, options: argparse.Namespace, refs: list[AdapterRef | None]) -> float:
    """Generated tokens per second. New prompts each time: the prefix cache must not help."""
    vocab_size = llm.ready.vocab_size
    prompts = [[random.randrange(100, vocab_size) for _ in range(options.prompt_len)] for _ in range(options.requests)]
    params = SamplingParams(temperature=options.temperature, max_tokens=options.output_len, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, [refs[i % len(refs)] for i in range(len(prompts))], show_progress=False)
    elapsed = time.perf_counter() - start
    return sum(len(output.token_ids) for output in outputs) / elapsed


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--floor", type=float, default=0.0)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    random.seed(0)
    start = time.perf_counter()
    llm = LLM(options.model, dtype=options.dtype, max_num_seqs=options.requests, max_lora_rank=max(64, options.rank))
    load_s = time.perf_counter() - start
    best = 0.0
    with llm:
        refs = adapters_of(llm, options.model, options.adapters, options.rank) or [None]
        for repetition in range(options.repeat):
            speed = measure(llm, options, refs)
            best = max(best, speed)
            report = {
                "engine": "chorus", "model": llm.ready.model, "dtype": llm.ready.dtype, "device": llm.ready.device,
                "adapters": options.adapters, "rank": options.rank if options.adapters else 0,
                "requests": options.requests, "prompt_len": options.prompt_len, "output_len": options.output_len,
                "repetition": repetition, "load_s": round(load_s, 1), "generated_tok_s": round(speed, 1),
            }  # fmt: skip
            print(json.dumps(report), flush=True)
    return 0 if best >= options.floor else 1


if __name__ == "__main__":
    sys.exit(main())
