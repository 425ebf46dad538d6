"""Models, adapters and batches of random numbers, at any shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adapters.loader import NUM_FIELDS, OFFSET_A, OFFSET_B, RANK, UNIT, PackedAdapter
from adapters.spec import LINEARS, MODULES, TABLES, AdapterRef, BaseShape
from bench.gpu.bench import Bench
from engine.batch import ForwardBatch, build_batch
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.model.transformer import Layer, Linear, Transformer
from engine.ops import LoraSlices, Ops
from engine.params import SamplingParams
from engine.quantization import Quantization
from engine.sequence import Sequence
from engine.step import Row, Step

BLOCK_SIZE = 16
MIXED_RANKS = (8, 16, 32, 64)


def random_model(
    config: ModelConfig, ops: Ops, device: str, num_layers: int, quantization: Quantization | None = None
) -> Transformer:
    """A model of this shape with random weights, small enough that activations stay finite."""
    config = replace(config, num_layers=num_layers, windows=config.windows[:1] * num_layers)
    dtype, hidden = ops.weight_dtype, config.hidden_size

    def linear(*shapes: tuple[int, int], kind: Quantization | None = quantization) -> Linear:
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(std=inputs**-0.5)
        return Linear(ops.pack_linear(weight, kind), torch.empty(0))

    def ones() -> Tensor:
        return torch.ones(hidden, dtype=ops.activation_dtype, device=device)

    shapes = config.linears
    layers = [
        Layer(
            ones(), linear(shapes["q_proj"], shapes["k_proj"], shapes["v_proj"]), None, None, linear(shapes["o_proj"]),
            ones(), linear(shapes["gate_proj"], shapes["up_proj"]), linear(shapes["down_proj"]), config.windows[0],
        )
        for _ in range(num_layers)
    ]  # fmt: skip
    embedding_VH = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device).normal_()
    head = linear((config.vocab_size, hidden), kind=quantization and quantization.careful)
    return Transformer(config, ops, embedding_VH, layers, ones(), head)


def random_adapter(shape: BaseShape, rank: int, dtype: torch.dtype) -> PackedAdapter:
    """All linears of all layers, in the loader's layout. One layer's numbers serve all: they lie apart."""
    directory = torch.zeros(shape.num_layers + 1, len(MODULES), NUM_FIELDS, dtype=torch.int64)
    offset = 0
    for layer in range(shape.num_layers):
        for module, name in enumerate(LINEARS):
            directory[layer, module, RANK] = rank
            for column, width in zip((OFFSET_A, OFFSET_B), reversed(shape.linears[name]), strict=True):
                directory[layer, module, column] = offset // UNIT
                offset += -(-rank * width // UNIT) * UNIT
    one = torch.empty(offset // shape.num_layers).normal_(std=0.02).to(dtype)
    buffer = one.repeat(shape.num_layers)
    return PackedAdapter(buffer, directory, buffer.nbytes, rank)


def table_adapter(shape: BaseShape, rank: int, dtype: torch.dtype) -> PackedAdapter:
    """LoRA of embed_tokens and lm_head, in the loader's layout."""
    directory = torch.zeros(shape.num_layers + 1, len(MODULES), NUM_FIELDS, dtype=torch.int64)
    offset = 0
    for name in TABLES:
        fields = directory[-1, MODULES.index(name)]
        fields[RANK] = rank
        for column, width in zip((OFFSET_A, OFFSET_B), reversed(shape.size(name)), strict=True):
            fields[column] = offset // UNIT
            offset += -(-rank * width // UNIT) * UNIT
    buffer = torch.empty(offset).normal_(std=0.1).to(dtype)
    return PackedAdapter(buffer, directory, buffer.nbytes, rank)


def filled_bank(bench: Bench, ranks: list[int]) -> LoraBank:
    """Adapters a0, a1, … of these ranks."""
    packed = {rank: random_adapter(bench.shape, rank, bench.dtype) for rank in set(ranks)}
    size = sum(packed[rank].size_bytes for rank in ranks)
    bank = LoraBank(bench.shape, size, bench.dtype, bench.device, has_arena=True)
    for index, rank in enumerate(ranks):
        bank.place(f"a{index}", packed[rank])
    return bank


def rows_of(num_rows: int, context: int, num_tokens: int, num_adapters: int) -> tuple[Row, ...]:
    """Rows that compute their last `num_tokens` of `context`; row i uses adapter i modulo their number, 0 = base."""
    per_row = -(-context // BLOCK_SIZE)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    rows = []
    for index in range(num_rows):
        tokens = [(index + position) % 97 + 3 for position in range(context)]
        ref = AdapterRef(f"a{index % num_adapters}") if num_adapters else None
        blocks = list(range(index * per_row, (index + 1) * per_row))
        sequence = Sequence(f"r{index}", 0, tokens, context, params, 0, adapter=ref, blocks=blocks)
        rows.append(Row(sequence, context - num_tokens, num_tokens, True))
    return tuple(rows)


def qkv_slices(config: ModelConfig) -> LoraSlices:
    ends = (config.q_size, config.q_size + config.kv_size, config.q_size + 2 * config.kv_size)
    return ((0, 0, ends[0]), (1, ends[0], ends[1]), (2, ends[1], ends[2]))


def lora_batch(bench: Bench, bank: LoraBank, num_rows: int, num_adapters: int, num_tokens: int) -> ForwardBatch:
    return build_batch(Step(rows_of(num_rows, num_tokens, num_tokens, num_adapters)), bank, BLOCK_SIZE, bench.device)


def called_again(launch: Callable[[], Any]) -> Callable[[], Any]:
    """In place of a CUDA graph, where there is no card."""
    launch()
    return launch
