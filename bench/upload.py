"""The largest adapter that people train, through the whole door: 70B, rank 128, all linears (q_proj in fp32, the rest
in bf16: 3.6 GB), pushed by `chorus adapters push` to a gateway as `chorus serve` runs it. A line of JSON.

    python -m bench.upload [--rank 128] [--layers 80] [--directory DIR]

It needs twice the adapter's size on the disk of --directory (a temporary one), and gives it back. Memory is the largest
that each process had: client (the push), gateway (the worker; `grown` since before), check (the child that validates).
The claim (exit status 1 if it does not hold): the gateway grows by less than 100 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from bench.gateway import ADMIN_KEY, DEMO_MODEL, Served, chorus, report
from bench.meter import descendants, peak_mb
from engine.model.config import ModelConfig

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
"""Llama 3 70B, with the demo model's vocabulary."""
LIMIT_GROWN_MB = 100
SPARE_BYTES = 1 << 30


def base(directory: Path, num_layers: int) -> Path:
    """A base without weights: uploads are checked against its shapes."""
    directory.mkdir()
    for path in DEMO_MODEL.glob("token*.json"):
        shutil.copy(path, directory)
    (directory / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))
    return directory


def shapes(config: ModelConfig, rank: int) -> dict[str, list[int]]:
    """Tensor → shape."""
    found = {}
    for layer in range(config.num_layers):
        for name, (outputs, inputs) in config.base_shape().linears.items():
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{block}.{name}"
            found[f"{key}.lora_A.weight"], found[f"{key}.lora_B.weight"] = [rank, inputs], [outputs, rank]
    return found


def write_adapter(directory: Path, config: ModelConfig, rank: int) -> int:
    """As PEFT saves it, tensor by tensor. → bytes"""
    header: dict[str, dict[str, Any]] = {}
    position = 0
    for name, shape in shapes(config, rank).items():
        dtype, width = ("F32", 4) if "q_proj" in name else ("BF16", 2)
        end = position + shape[0] * shape[1] * width
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    if shutil.disk_usage(directory.parent).free < 2 * position + SPARE_BYTES:
        raise SystemExit(f"{directory.parent} has no room for {2 * position} bytes")
    directory.mkdir()
    text = json.dumps(header).encode()
    values = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.01
    pool = {"F32": values.tobytes(), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()}
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            start, end = entry["data_offsets"]
            data = memoryview(pool[entry["dtype"]])
            while start < end:
                start += file.write(data[: end - start])
    options = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (directory / CONFIG_FILE).write_text(json.dumps(options))
    return (directory / WEIGHTS_FILE).stat().st_size


async def push(adapter: Path, served: Served) -> dict[str, Any]:
    """One push, with the largest memory of each process on the way."""
    (gateway,) = served.parts["gateway"]
    before, checks, started = peak_mb(gateway), 0.0, time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli", "adapters", "push", str(adapter), "--tenant", "bench", "--json",
        env={**os.environ, "CHORUS_URL": f"http://127.0.0.1:{served.port}", "CHORUS_ADMIN_KEY": ADMIN_KEY},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    answer = asyncio.create_task(process.communicate())
    client = 0.0
    while not answer.done():
        client = max(client, peak_mb(process.pid))
        checks = max([checks, *(peak_mb(pid) for pid in descendants(gateway)[1:])])
        await asyncio.wait({answer}, timeout=0.1)
    if process.returncode:
        raise SystemExit(process.returncode)
    found = json.loads((await answer)[0])
    return {
        "seconds": round(time.monotonic() - started, 1), "applied": found["num_tensors"], "outcome": found["outcome"],
        "gateway_mb": peak_mb(gateway), "grown_mb": round(peak_mb(gateway) - before, 1), "check_mb": checks,
        "client_mb": client,
    }  # fmt: skip


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--directory", help="where everything is put for the time being")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chorus-upload-", dir=options.directory) as temporary:
        root = Path(temporary)
        model = base(root / "base", options.layers)
        size = write_adapter(root / "large", ModelConfig.from_dir(model), options.rank)
        served = argparse.Namespace(model=model, database="", workers=1)
        (root / "data").mkdir()
        async with chorus(served, root / "data", max_upload=2 * size, max_lora_rank=options.rank) as gateway:
            found = await push(root / "large", gateway)
            left = [path.name for path in (root / "data" / "adapters").rglob("*stag*/*")]
        report("upload", bytes=size, **found, stages_left=len(left))
    return int(found["grown_mb"] > LIMIT_GROWN_MB or bool(left))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
