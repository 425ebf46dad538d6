"""Zoo: any number of random adapters in a store, made quickly. Knows no engine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from adapters.spec import AdapterRef, BaseShape
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore
from adapters.validation import Limits, validate


class Zoo:
    """Adapters over all linears in bf16, as peft would save them; each takes its values from own places of one pool of
    random numbers."""

    def __init__(self, root: Path, shape: BaseShape, seed: int = 0) -> None:
        self.store = DirectoryStore(root)
        self._shape = shape
        self._draw = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(1 << 22, generator=self._draw)
        self._sizes: dict[int, int] = {}

    def add(self, rank: int) -> AdapterRef:
        """A new one in the store."""
        stage = self.store.stage()
        self.write(stage, rank)
        if rank not in self._sizes:
            self._sizes[rank] = validate(stage, self._shape, Limits(max_rank=rank)).packed_bytes
        return AdapterRef(self.store.commit(stage), rank, self._sizes[rank])

    def write(self, directory: Path, rank: int) -> Path:
        """A new one's files in `directory`."""
        tensors = {}
        for layer in range(self._shape.num_layers):
            for name, (outputs, inputs) in self._shape.linears.items():
                block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                key = f"base_model.model.model.layers.{layer}.{block}.{name}"
                tensors[f"{key}.lora_A.weight"] = self._values(rank, inputs, inputs**-0.5)
                tensors[f"{key}.lora_B.weight"] = self._values(outputs, rank, 0.02)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / WEIGHTS_FILE)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(self._shape.linears)}
        (directory / CONFIG_FILE).write_text(json.dumps(config))
        return directory

    def _values(self, rows: int, columns: int, scale: float) -> torch.Tensor:
        start = int(torch.randint(len(self._pool) - rows * columns, (), generator=self._draw))
        return (self._pool[start : start + rows * columns] * scale).view(rows, columns).bfloat16()


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for thousands of adapters, gone afterwards."""
    return tempfile.TemporaryDirectory(prefix="chorus-zoo-")
