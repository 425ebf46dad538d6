"""Drives a Transformer without scheduler and runner: sequences with blocks, one forward per call, logits per row."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.loader import NUM_FIELDS, OFFSET_A, OFFSET_B, RANK, UNIT, PackedAdapter
from adapters.spec import LINEARS, MODULES, AdapterRef, BaseShape
from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.transformer import Transformer
from engine.params import SamplingParams
from engine.sequence import Sequence
from engine.step import Row, Step

BLOCK_SIZE = 16


def make_sequence(tokens: list[int], blocks: list[int], adapter: str | None = None, **params: object) -> Sequence:
    ref = AdapterRef(adapter) if adapter else None
    return Sequence("r", 0, list(tokens), len(tokens), SamplingParams(**params), 0, adapter=ref, blocks=blocks)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Part:
    """Positions [start, end) of a sequence."""

    sequence: Sequence
    start: int
    end: int


def step_of(parts: Rows[Part]) -> Step:
    return Step(tuple(Row(p.sequence, p.start, p.end - p.start, p.end == p.sequence.num_tokens) for p in parts))


def forward(model: Transformer, cache: KVCache, parts: Rows[Part], bank: LoraBank | None = None) -> list[Tensor]:
    """Logits of every position of every part, in the order of the parts."""
    batch = build_batch(step_of(parts), bank, cache.block_size)
    logits = model.logits(model.forward(batch, cache), batch, torch.arange(batch.num_tokens))
    by_place = {}
    for start, length, table in zip(batch.starts_S, batch.lengths_S, batch.tables_SB, strict=True):
        by_place[int(table[0])] = logits[int(start) : int(start + length)]
    return [by_place[part.sequence.blocks[0]] for part in parts]


def random_adapter(
    shape: BaseShape,
    ranks: dict[tuple[int, str], int],
    seed: int,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.3,
) -> PackedAdapter:
    """Packs random A and B for each (layer, module) → rank, in the loader's layout."""
    draw = torch.Generator().manual_seed(seed)
    directory = torch.zeros(shape.num_layers + 1, len(MODULES), NUM_FIELDS, dtype=torch.int64)
    parts: list[Tensor] = []
    offset = 0
    for (layer, name), rank in ranks.items():
        outputs, inputs = shape.linears[name]
        fields = directory[layer, LINEARS.index(name)]
        fields[RANK] = rank
        for column, width in ((OFFSET_A, inputs), (OFFSET_B, outputs)):
            fields[column] = offset // UNIT
            size = -(-rank * width // UNIT) * UNIT
            part = torch.randn(size, generator=draw) * (strength / max(width, 1) ** 0.5)
            parts.append(part)
            offset += size
    buffer = torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype)
    return PackedAdapter(buffer, directory, buffer.nbytes, max(ranks.values(), default=0))
