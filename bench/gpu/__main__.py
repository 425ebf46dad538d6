"""GPU: is every kernel right, how near is it to its floor, and what do adapters cost a whole engine at 8B size.

    python -m bench.gpu [--toy] [--layers 32] [--json PATH]

Needs torch with CUDA, Triton and this repository, no checkpoint: weights are random. Takes some minutes. Three parts:

    check     each kernel against float64 on the same inputs
    kernels   each kernel's time beside its floor (the bytes that it must move or the products that it must do, at the
              rates that this card reached just before) and beside what one would do without it
    engine    decode steps through the runner: base only, 1, 8, 32 (and 128) distinct adapters, of rank 16 and mixed;
              the share of the base's rate that is kept, and the largest that bytes allow

--toy takes a tiny model in fp32 and runs where there is no card, under Triton's interpreter (TRITON_INTERPRET=1), to
its end: its times mean nothing. What is measured on a card belongs in docs/performance.md, with the card's name.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu.bench import Bench
from bench.gpu.checks import checks
from bench.gpu.clock import rates
from bench.gpu.inputs import BLOCK_SIZE, called_again
from bench.gpu.kernels import kernels
from bench.gpu.steps import steps
from engine.model.config import ModelConfig
from engine.ops.cards import Card, card_of

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "tie_word_embeddings": False,
    "eos_token_id": 2,
}  # fmt: skip
TOY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip


def make_bench(is_toy: bool, num_layers: int) -> Bench:
    from engine.ops.cuda import CudaOps

    if is_toy and not torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise SystemExit("without a card, set TRITON_INTERPRET=1")
        ops = CudaOps(torch.float32, BLOCK_SIZE, Card(2, programs_each=2, options={}), recorder=called_again)
        device, dtype = "cpu", torch.float32
    else:
        device, dtype = "cuda", torch.bfloat16
        ops = CudaOps(dtype, BLOCK_SIZE, card_of(device))
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    bytes_s, flop_s = rates(device, dtype, is_toy)
    print(f"a copy moves {bytes_s / 1e9:.0f} GB/s, a product does {flop_s / 1e12:.2f} TFLOP/s", flush=True)
    config = ModelConfig.from_dict(TOY if is_toy else LLAMA_8B | {"num_hidden_layers": num_layers})
    if is_toy:
        return Bench(config, ops, device, dtype, bytes_s, flop_s, 1, 24, ((4, 20, (1, 4)), (6, 20, (1, 4, 6))))
    workloads = ((32, 256, (1, 8, 32)), (256, 1024, (1, 8, 32, 128)))
    return Bench(config, ops, device, dtype, bytes_s, flop_s, 50, 2048, workloads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a tiny model, with or without a card")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B model: fewer for a card with less memory")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args()
    bench = make_bench(arguments.toy, arguments.layers)
    records = []
    with torch.inference_mode():
        for part in (checks, kernels):
            found = part(bench)
            print(*found, sep="\n", flush=True)
            records += found
        records += steps(bench)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
    limit = 1e-4 if bench.dtype == torch.float32 else 0.03
    wrong = [record.name for record in records if record.error is not None and not record.error <= limit]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
