"""A large adapter in shards goes through upload, join and check in bounded memory."""

from __future__ import annotations

import asyncio
import json
import resource
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters import sandbox
from adapters.checksum import CHECKSUM_FILE
from adapters.shards import INDEX_FILE
from adapters.spec import AdapterSpec, BaseShape
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore
from adapters.validation import Limits
from gateway.upload import receive
from tests.services import IS_CI

NUM_LAYERS, HIDDEN, RANK = (80, 8192, 64) if IS_CI else (40, 4096, 64)
SHAPE = BaseShape(
    num_layers=NUM_LAYERS,
    vocab_size=1000,
    hidden_size=HIDDEN,
    linears={
        name: (HIDDEN, HIDDEN) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    },
    base_name="large",
)
NUM_SHARDS = 4
TARGETS = ["q_proj", "v_proj"]
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "large", "r": RANK, "lora_alpha": RANK,
    "bias": "none", "target_modules": TARGETS,
}  # fmt: skip
BOUNDARY = "xyz"


def shards() -> list[dict[str, list[int]]]:
    """Names and shapes of the tensors of each shard; bf16."""
    every = [
        (f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight", shape)
        for layer in range(NUM_LAYERS)
        for name in TARGETS
        for side, shape in (("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK]))
    ]
    return [dict(every[number::NUM_SHARDS]) for number in range(NUM_SHARDS)]


def header(shapes: dict[str, list[int]]) -> tuple[bytes, int]:
    """The start of a shard, and how many bytes of data follow."""
    entries, position = {}, 0
    for name, shape in shapes.items():
        size = shape[0] * shape[1] * 2
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text, position


async def body() -> AsyncIterator[bytes]:
    def part(name: str) -> bytes:
        return f'\r\n--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()

    block = b"\x80\x3c" * (1 << 15)  # 2⁻⁶ in bf16
    yield part("config")[2:] + json.dumps(CONFIG).encode()
    for shapes in shards():
        start, left = header(shapes)
        yield part("weights") + start
        while left:
            yield block[:left]
            left -= min(left, len(block))
    places = {name: f"{number}.safetensors" for number, shapes in enumerate(shards()) for name in shapes}
    yield part("index") + json.dumps({"weight_map": places}).encode() + f"\r\n--{BOUNDARY}--\r\n".encode()


async def take_in(root: Path) -> tuple[AdapterSpec, int]:
    """What an upload goes through. → what was found, and the peak of this process's memory in bytes."""
    store = DirectoryStore(root)
    stage = await asyncio.to_thread(store.stage)
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    await receive(body(), kind, stage, 4 << 30, wants_name=False)
    spec = await sandbox.run(stage, SHAPE, Limits(max_bytes=4 << 30))
    await asyncio.to_thread(store.commit, stage)
    return spec, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    spec, peak = asyncio.run(take_in(Path(sys.argv[1])))
    print(json.dumps({"modules": len(spec.modules), "tensors": spec.num_tensors, "grown": peak - before}))


@pytest.mark.timeout(600)
def test_a_large_sharded_adapter_needs_little_memory(tmp_path: Path) -> None:
    """A sharded adapter (80 MiB; with CI=true 320 MiB) arrives whole as one file, and the process that takes it in
    grows by less than 48 MiB; the child that joins and checks it is bounded by its limit."""
    found = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path)], capture_output=True, text=True, check=False, timeout=500
    )

    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert (result["modules"], result["tensors"]) == (2 * NUM_LAYERS, 4 * NUM_LAYERS)
    assert result["grown"] < 48 << 20
    (entry,) = (tmp_path / "store").iterdir()
    assert {path.name for path in entry.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, CHECKSUM_FILE}
    assert (entry / WEIGHTS_FILE).stat().st_size > sum(header(shapes)[1] for shapes in shards())
    assert not (entry / INDEX_FILE).exists()


if __name__ == "__main__":
    main()
