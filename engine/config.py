"""EngineConfig: what an engine is told at start. Knows no environment variable and no command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adapters.bucket import BucketConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that the engine needs to know before it starts.

    model                  directory of a checkpoint (config.json, *.safetensors, tokenizer files)
    store_dir              root of the adapter store (adapters/storage.py); None = no adapters, the base model only
    bucket                 where the adapters are, if not in store_dir: that has stages and a cache then
    device                 "auto" takes cuda where a card is, else cpu
    dtype                  of weights, activations and KV; "auto" = bfloat16
    quantization           of the base's linears, made at load; quantization_group: inputs that share a scale
    max_model_len          prompt + output tokens of one choice; None = the model's own limit
    kv_memory_bytes        size of the KV arena; None = what the plan leaves
    adapter_memory_bytes   size of the adapter arena; None = from the plan
    kv_host_bytes          host memory for KV blocks that left the device; 0 = none, None = from the plan
    kv_disk_dir            directory for such blocks, beside the host memory; None = no disk
    kv_disk_bytes          how much it may hold
    swap                   whether such blocks come back by copy: "on" always, "auto" if that is quicker than computing
                           them, "off" as auto, but never for a request that was preempted
    max_num_seqs           sequences that may run in one step
    max_batched_tokens     tokens computed in one step (decode + prefill chunks)
    block_size             KV slots per block
    max_lora_rank          adapters above it are refused
    max_waiting            requests that may wait in the engine, and per lane
    adapter_wait_s         how long a request may wait for its adapter to load
    ageing_s               a lane's first request that waits so long unserved is lifted to the class above
    seed                   from which seeds of requests without one are drawn
    """

    model: Path
    store_dir: Path | None = None
    bucket: BucketConfig | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    quantization_group: int = 128
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    adapter_memory_bytes: int | None = None
    kv_host_bytes: int | None = None
    kv_disk_dir: Path | None = None
    kv_disk_bytes: int = 16 << 30
    swap: Literal["on", "off", "auto"] = "auto"
    max_num_seqs: int = 64
    max_batched_tokens: int = 1024
    block_size: int = 16
    max_lora_rank: int = 64
    enable_prefix_caching: bool = True
    max_waiting: int = 8192
    max_waiting_per_lane: int = 1024
    adapter_wait_s: float = 10.0
    ageing_s: float = 30.0
    seed: int = 0


class ConfigError(ValueError):
    """The configuration can't work; the message names the nearest setting that does."""


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)


def parse_size(value: int | str | None) -> int | None:
    """Bytes of "512MiB", "1.5g", "1GB", 1048576; "auto" and "" → None. kB is 1000 bytes; k, KiB are 1024."""
    if not isinstance(value, str):
        return value
    if value.strip().lower() in ("", "auto"):
        return None
    match = SIZE.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f"{value!r} is not a size; write it as 512MiB, 2GB or in bytes")
    number, prefix, suffix = match.groups()
    base = 1000 if suffix.lower() == "b" and prefix else 1024
    return int(float(number) * base ** "kmgt".find(prefix.lower()) * base) if prefix else int(float(number))
