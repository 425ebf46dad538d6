"""What a step of a real model launches, recorded without a card: tensors on torch's "meta" device have shapes and types
but no memory, and each launch is written down as what the compiler would be given for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from adapters.loader import NUM_FIELDS, PackedAdapter
from adapters.spec import MODULES
from bench.gpu.inputs import called_again, random_model
from engine.batch import ForwardBatch, Segment
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.ops import attention, integer_linear, lora, rows, sampling, table_lora, work_list
from engine.ops.cards import Card
from engine.ops.cuda import CudaOps
from engine.ops.sampling import choose
from engine.quantization import Quantization
from engine.sampler import NUM_CANDIDATES

KERNELS = tuple(
    value
    for module in (attention, integer_linear, lora, rows, sampling, table_lora, work_list)
    for name, value in vars(module).items()
    if name.endswith("_kernel")
)

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
            torch.float64: "*fp64", torch.int8: "*i8", torch.uint8: "*u8"}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    """Everything that a compiled kernel depends on. `key` is that, as text."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        return repr((self.kernel, self.signature, [(k, str(v)) for k, v in self.constants], self.aligned, self.options))


def describe(kernel: triton.JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """As Triton's own launcher specialises: a 1 is a constant, multiples of 16 are known to be such."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    signature, aligned = [], []
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        kind = "constexpr"
        if name in constants:
            pass
        elif isinstance(value, torch.Tensor):
            kind = POINTERS[value.dtype]
            if value.storage_offset() * value.itemsize % 16 == 0:
                aligned.append(index)
        elif isinstance(value, float):
            kind = "fp32"
        elif kernel.params[index].do_not_specialize:
            kind = "i32"
        elif value == 1:
            constants[name] = 1
        else:
            kind = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0:
                aligned.append(index)
        signature.append((name, kind))
    return Launch(kernel.__name__, tuple(signature), tuple(constants.items()), tuple(aligned), tuple(options.items()))


@contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """Inside, kernels are written down instead of launched."""
    found: dict[str, Launch] = {}

    def recorder(kernel: triton.JITFunction) -> Any:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            launch = describe(kernel, args, kwargs)
            found[launch.key] = launch

        return run

    try:
        for kernel in KERNELS:
            kernel.run = recorder(kernel)
        yield found
    finally:
        for kernel in KERNELS:
            del kernel.run


def launches_of(config: ModelConfig, card: Card) -> list[Launch]:
    """Of a layer: decode steps of 1, 32 and 256 rows, a long prompt beside decodes, and a long context, all with
    adapters; the base in 16 bits, int8 and int4. KV is so large that offsets in it need 64 bits."""
    ops = CudaOps(torch.bfloat16, 16, card, called_again)
    cache = KVCache(config, (1 << 32) // config.kv_size // 16, 16, torch.bfloat16, "meta")
    bank = LoraBank(config.base_shape(), 1 << 24, torch.bfloat16, "meta")
    directory = torch.zeros(config.num_layers + 1, len(MODULES), NUM_FIELDS, dtype=torch.int64)
    bank.place("a", PackedAdapter(torch.zeros(1024, dtype=torch.bfloat16), directory, 2048, 16))
    with recorded() as found:
        for quantization in (None, Quantization(8, 128), Quantization(4, 128)):
            model = random_model(config, ops, "meta", 1, quantization)
            for lengths, width in (
                ([1], 128),
                ([1] * 32, 128),
                ([1] * 256, 128),
                ([1] * 64, 8192),
                ([1, 1, 2046], 128),
            ):
                batch = batch_of(lengths, bank, width)
                model.logits(model.forward(batch, cache), batch, batch.logit_rows)
        for num_rows in (1, 256, 2048):
            tables_of(num_rows, config, ops, bank)
        probs_SC = torch.empty(32, NUM_CANDIDATES, device="meta")
        choose(probs_SC, probs_SC.long(), np.ones((3, 32)), np.ones(32), is_whole=False)
    return list(found.values())


def tables_of(num_rows: int, config: ModelConfig, ops: CudaOps, bank: LoraBank) -> None:
    """LoRA of the embedding of so many tokens, and of the head for them."""
    segments, ids = [Segment(0, 0, num_rows)], torch.empty(num_rows, dtype=torch.int64, device="meta")
    x_TH = torch.empty(num_rows, config.hidden_size, dtype=torch.bfloat16, device="meta")
    ops.table_lora.embed(x_TH, ids, segments, bank)
    ops.table_lora.head(torch.empty(num_rows, config.vocab_size, device="meta"), x_TH, ids, segments, bank)


def batch_of(lengths: list[int], bank: LoraBank, width: int) -> ForwardBatch:
    lengths_S = np.array(lengths, np.int64)
    ends_S = np.cumsum(lengths_S)
    on_meta = torch.empty(int(ends_S[-1]), dtype=torch.int64, device="meta")
    tables_SB = np.zeros((len(lengths), width), np.int64)
    return ForwardBatch(
        on_meta, on_meta, on_meta, ends_S - lengths_S, lengths_S, lengths_S, tables_SB, 16,
        on_meta, tuple(lengths), (Segment(0, 0, int(ends_S[-1])),), bank,
    )  # fmt: skip
