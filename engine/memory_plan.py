"""MemoryPlan: how weights, adapters and KV share the memory of one engine. What can't fit is refused here, before
anything is read or allocated, with the nearest setting that does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import ConfigError, EngineConfig
from engine.model.config import ModelConfig
from engine.ops.cards import card_of
from engine.quantization import Quantization, quantization_of

PROCESS_BYTES = 512 << 20
"""What an engine takes beside its tensors: torch's libraries, thread pools, allocator slack."""

MAX_HOST_BYTES = 16 << 30
"""Pages are pinned at start, which takes time; who wants more says so."""

GRAPH_BYTES = 512 << 20
"""What CUDA graphs of decode steps take on a card, and the memory between their launches."""

CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""(limit, usage) of the control group, versions 2 and 1."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How the memory of one engine is divided, decided before anything is allocated. str() is what start-up prints.

    weights_bytes     of the model as the ops keep it
    workspace_bytes   the process itself, activations and logits of the largest step
    adapter_bytes     the adapter arena; kv_bytes: the KV arena, num_blocks whole blocks
    host_kv_bytes     host memory for KV blocks that left the device
    max_model_len     prompt + output tokens of one choice
    """

    device: str
    dtype: torch.dtype
    quantization: Quantization | None
    available_bytes: int
    weights_bytes: int
    workspace_bytes: int
    adapter_bytes: int
    kv_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    host_kv_bytes: int = 0

    @property
    def weights_name(self) -> str:
        """How the base's weights are kept: bfloat16, or bfloat16+int4g128."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self.quantization is None else f"{name}+{self.quantization.name}g{self.quantization.group}"

    def __str__(self) -> str:
        num_tokens = self.num_blocks * self.block_size
        return (
            f"memory on {self.device}, {_size(self.available_bytes)} available: "
            f"weights {_size(self.weights_bytes)} ({self.weights_name}), "
            f"adapters {_size(self.adapter_bytes)}, workspace {_size(self.workspace_bytes)}, "
            f"KV {_size(self.kv_bytes)} = {num_tokens} tokens = "
            f"{num_tokens / self.max_model_len:.1f} requests of {self.max_model_len} tokens"
            + (f", and {_size(self.host_kv_bytes)} on the host for blocks that leave it" if self.host_kv_bytes else "")
        )


def plan_memory(config: EngineConfig, model: ModelConfig, available_bytes: int | None = None) -> MemoryPlan:
    """Divides the memory that is free now (or `available_bytes`). Raises ConfigError naming the nearest setting that
    fits."""
    device = _device(config.device)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    free = _free_bytes(device) if available_bytes is None else available_bytes
    limit = int(free * 0.9)
    workspace = _workspace_bytes(config, model) + (GRAPH_BYTES if device != "cpu" else 0)
    quantization = quantization_of(config)
    weights = _weights_bytes(model, dtype, quantization)
    adapters = _adapter_bytes(config, model, device, limit - weights - workspace)
    room = limit - weights - workspace - adapters
    block = block_bytes(model, config.block_size, dtype)
    host = _host_bytes(config, block, room if device == "cpu" else _free_bytes("cpu"), is_shared=device == "cpu")
    if device == "cpu":
        room -= host
    max_model_len, kv = _kv_bytes(config, model, dtype, room, is_shared=device == "cpu")
    return MemoryPlan(
        device=device,
        dtype=dtype,
        quantization=quantization,
        available_bytes=free,
        weights_bytes=weights,
        workspace_bytes=workspace,
        adapter_bytes=adapters,
        kv_bytes=kv // block * block,
        block_size=config.block_size,
        num_blocks=kv // block,
        max_model_len=max_model_len,
        host_kv_bytes=host,
    )


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    return 2 * model.num_layers * block_size * model.kv_size * dtype.itemsize


def adapter_bytes(model: ModelConfig, rank: int, itemsize: int) -> int:
    """An adapter of all linears at this rank."""
    return model.num_layers * rank * sum(map(sum, model.linears.values())) * itemsize


def _device(name: str) -> str:
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name.startswith("cuda") and not has_cuda:
        raise ConfigError(f"device {name}: no CUDA device is usable here; use --device cpu")
    if name != "cpu" and not name.startswith("cuda"):
        raise ConfigError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    if name != "cpu":
        card_of(name)
    return name


def _free_bytes(device: str) -> int:
    """What this process may still take: of the card, or of the machine and its control group."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]  # where the kernel doesn't tell
    if Path("/proc/meminfo").is_file():
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        free = [int(fields[1]) * 1024 for fields in lines if fields[0] == "MemAvailable:"]
    for limit, usage in CGROUP_FILES:
        if limit.is_file() and usage.is_file() and limit.read_text().strip().isdigit():
            free.append(int(limit.read_text()) - int(usage.read_text()))
    return max(0, min(free))


def _weights_bytes(model: ModelConfig, dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Linears and head, packed, and the embedding table (a copy of its own even where it is tied to the head)."""
    embedding = model.vocab_size * model.hidden_size * dtype.itemsize
    if quantization is None:
        linears = model.num_layers * sum(out * inner for out, inner in model.linears.values()) * dtype.itemsize
        return linears + 2 * embedding
    linears = 0
    for layer in range(model.num_layers):
        for name, shape in model.linears.items():
            kind = quantization.of(name, layer, model.num_layers)
            linears += kind.num_bytes(*shape) + kind.lowest_bytes(*shape)
    return linears + quantization.careful.num_bytes(model.vocab_size, model.hidden_size) + embedding


def _workspace_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Generous: the widest activations of a full step twice over, three copies of the sampled rows' logits."""
    widest = 2 * model.intermediate_size + 4 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size)
    logits = config.max_num_seqs * model.vocab_size * 3
    return PROCESS_BYTES + 4 * (2 * config.max_batched_tokens * widest + logits)


def _adapter_bytes(config: EngineConfig, model: ModelConfig, device: str, room: int) -> int:
    """By default room for 16 of the largest adapters, at most an eighth of what is left, at least one."""
    one = adapter_bytes(model, config.max_lora_rank, 4 if device == "cpu" else 2)
    if config.adapter_memory_bytes is None:
        return max(one, min(16 * one, room // 8))
    if 0 < config.adapter_memory_bytes < one:
        rank = config.max_lora_rank * config.adapter_memory_bytes // one
        raise ConfigError(
            f"--adapter-memory {_size(config.adapter_memory_bytes)} can't hold one adapter of --max-lora-rank "
            f"{config.max_lora_rank}: use --adapter-memory {one}" + (f" or --max-lora-rank {rank}" if rank else "")
        )
    return config.adapter_memory_bytes


def _host_bytes(config: EngineConfig, block: int, room: int, is_shared: bool) -> int:
    """Whole blocks. By default none where host and device are one memory, unless something needs it; else an eighth of
    what is free."""
    wanted = config.kv_host_bytes
    is_needed = config.swap == "on" or config.kv_disk_dir is not None
    if wanted is None:
        wanted = 0 if is_shared and not is_needed else min(room // 8, MAX_HOST_BYTES)
    elif wanted > room // 2:
        raise ConfigError(f"--kv-host-bytes {_size(wanted)} is more than half of what is free: use {room // 2}")
    if wanted < block and (is_needed or wanted):
        raise ConfigError(f"--swap on, --kv-disk-dir and --kv-host-bytes need host memory: use --kv-host-bytes {block}")
    return wanted // block * block


def _kv_bytes(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, room: int, is_shared: bool
) -> tuple[int, int]:
    """(max_model_len, bytes for KV). By default enough for max_num_seqs whole sequences, and at most half of what is
    left where the memory is shared with others."""
    wanted_len = config.max_model_len or model.max_position
    if wanted_len > model.max_position:
        raise ConfigError(f"--max-model-len {wanted_len} is above the model's limit: use {model.max_position}")
    block = block_bytes(model, config.block_size, dtype)
    if room < block:
        raise ConfigError(
            f"{model.name} leaves no memory for KV ({_size(max(room, 0))} of the {_size(block)} that a block takes): "
            "use a smaller model, --dtype bfloat16 or a smaller --adapter-memory"
        )
    kv = config.kv_memory_bytes
    if kv is None:
        whole = -(-wanted_len // config.block_size) * block
        kv = max(min(config.max_num_seqs * whole, room // 2 if is_shared else room), min(whole, room))
    elif kv > room:
        raise ConfigError(f"--kv-memory {_size(kv)} doesn't fit: use at most {room // block * block}")
    elif kv < block:
        raise ConfigError(f"--kv-memory {_size(kv)} is less than one block: use at least {block}")
    num_tokens = kv // block * config.block_size
    if config.max_model_len is not None and num_tokens < wanted_len:
        needed = -(-wanted_len // config.block_size) * block
        raise ConfigError(
            f"--max-model-len {wanted_len} needs {needed} bytes of KV, {kv} are there: use --max-model-len {num_tokens}"
            + (f" or --kv-memory {needed}" if needed <= room else "")
        )
    return min(wanted_len, num_tokens), kv


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
