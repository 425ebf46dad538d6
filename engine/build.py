"""build_core(): from an EngineConfig to a running engine, offline or behind a socket. The only place that knows which
parts there are and in which order they come: plan → KV → weights → adapter bank → scheduler → core."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import torch

from adapters import spans
from adapters.bucket_store import open_store
from adapters.loader import Loader, PackedAdapter
from adapters.residency import ResidencyCache
from adapters.spec import AdapterMissing, AdapterRef, BaseShape
from engine.block_pool import BlockPool
from engine.config import ConfigError, EngineConfig
from engine.core import EngineCore
from engine.intake import SchedulerConfig
from engine.kv_cache import KVCache
from engine.kv_setup import build_tiers, kv_layout, measure
from engine.lanes import Lanes
from engine.lora import LoraBank
from engine.memory_plan import MemoryPlan, adapter_bytes, plan_memory
from engine.model.base_weights import ModelBase
from engine.model.calibration import TEXT, Calibration, calibration_rows
from engine.model.config import ModelConfig
from engine.model.weight_cache import WeightCache
from engine.model.weights import load_model
from engine.ops import Ops, create_ops
from engine.ops.compile import cache_dirs
from engine.ops.native import NativeOps
from engine.protocol import Ready
from engine.quantization import VERSION
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.text import Tokenizer
from engine.vocabulary import TokenizerError
from engine.warmup import no_adapter, steps_to_warm, warm_up

log = logging.getLogger(__name__)


def build_core(config: EngineConfig) -> tuple[EngineCore, Ready]:
    """Loads the model and allocates everything. Raises ConfigError for what can't run or doesn't fit; what can be
    refused without reading the weights is refused before."""
    model_config = ModelConfig.from_dir(config.model)
    plan = plan_memory(config, model_config)
    log.info("%s", plan)
    ops = create_ops(plan.device, plan.dtype, model_config.head_dim, plan.block_size, plan.quantization)
    calibration = _calibration(config, model_config, plan, ops)
    cache = KVCache(model_config, plan.num_blocks, plan.block_size, ops.weight_dtype, plan.device)
    with cache.prefault():
        model = load_model(config.model, model_config, ops, plan.device, plan.quantization, calibration)
    pool = BlockPool(plan.num_blocks, plan.block_size, config.enable_prefix_caching)
    tiers, host = build_tiers(config, plan, pool, cache)
    shape = model_config.base_shape()
    bank = LoraBank(shape, plan.adapter_bytes, ops.adapter_dtype, plan.device)
    sampler = Sampler(model_config.eos_token_ids, ops.draw, ops.greedy)
    runner = ModelRunner(model, cache, bank, sampler, plan.device, host)
    if plan.device != "cpu":
        max_tokens = min(config.max_batched_tokens, plan.max_model_len)
        steps = steps_to_warm(config.max_num_seqs, max_tokens, plan.num_blocks, plan.block_size)
        warm_up(runner, bank, no_adapter(model_config.num_layers, ops.adapter_dtype), steps, plan.block_size)
    if host is not None:
        measure(tiers.cost, runner, host, config.max_batched_tokens)
    largest = adapter_bytes(model_config, config.max_lora_rank, ops.adapter_dtype.itemsize)
    keep_bytes = max(0, plan.adapter_bytes - largest)
    fetch = _fetch(config, shape, ops, ModelBase(model))
    residency = ResidencyCache(bank, fetch, plan.adapter_bytes, keep_bytes=keep_bytes)
    lanes = Lanes(config.max_waiting_per_lane, slack=float(config.max_batched_tokens))
    version = "" if plan.quantization is None else f".{VERSION}"
    kind = f"{plan.weights_name}{version}/{kv_layout(ops, cache)}"
    scheduler = Scheduler(_scheduler_config(config, model_config, plan, kind), pool, residency, lanes, tiers)
    return EngineCore(scheduler, runner, residency, pool), _ready(config, model_config, plan, keep_bytes)


def _calibration(config: EngineConfig, model: ModelConfig, plan: MemoryPlan, ops: Ops) -> Calibration | None:
    """What to quantise by, where the ops can. Raises ConfigError for a model without a tokenizer."""
    if plan.quantization is None or not plan.quantization.is_calibrated or not isinstance(ops, NativeOps):
        return None
    try:
        tokenizer = Tokenizer(config.model)
    except TokenizerError as error:
        raise ConfigError(f"--quantization {plan.quantization.name} calibrates by text: {error}") from error
    rows_SL = calibration_rows(tokenizer.encode(TEXT.read_text("utf-8")))
    directory = next(cache_dirs(), None)
    if directory is None:
        return Calibration(rows_SL)
    parts = [repr(plan.quantization), str(VERSION), ops.layout, hashlib.sha256(rows_SL.numpy().data).hexdigest()]
    return Calibration(rows_SL, WeightCache(directory, model.fingerprint, [*parts, *_weight_files(config.model)]))


def _weight_files(path: Path) -> list[str]:
    """What changes with them: a fingerprint reads only samples of large files."""
    stats = ((file.name, file.stat()) for file in sorted(path.glob("*.safetensors")))
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]


def _fetch(config: EngineConfig, shape: BaseShape, ops: Ops, base: ModelBase) -> Callable[[AdapterRef], PackedAdapter]:
    """Reads one adapter from the store; runs in the residency's threads."""
    move = ops.move if isinstance(ops, NativeOps) else spans.move
    loader = Loader(shape, ops.adapter_dtype, config.max_lora_rank, base, move)
    store = None if config.store_dir is None else open_store(config.store_dir, config.bucket)

    def fetch(ref: AdapterRef) -> PackedAdapter:
        if store is None:
            raise AdapterMissing("adapter_missing", "this engine has no adapter store")
        return loader.load_stored(store, ref)

    return fetch


def _scheduler_config(config: EngineConfig, model: ModelConfig, plan: MemoryPlan, kv_kind: str) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        fingerprint=model.fingerprint,
        dtype=kv_kind,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_waiting=config.max_waiting,
        adapter_wait_s=config.adapter_wait_s,
        ageing_s=config.ageing_s,
        seed=config.seed,
    )


def _ready(config: EngineConfig, model: ModelConfig, plan: MemoryPlan, keep_bytes: int) -> Ready:
    return Ready(
        boot_id=secrets.token_hex(8),
        model=model.name,
        fingerprint=model.fingerprint,
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_lora_rank=config.max_lora_rank,
        adapter_memory_bytes=plan.adapter_bytes,
        pin_memory_bytes=keep_bytes,
        dtype=_name(plan.dtype),
        device=plan.device,
        quantization=config.quantization,
        kv_host_bytes=plan.host_kv_bytes,
        kv_disk_bytes=0 if config.kv_disk_dir is None else config.kv_disk_bytes,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
