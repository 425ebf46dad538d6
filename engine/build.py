"""build_core(): from an EngineConfig to a running engine, offline or behind a socket. The only place that knows which
parts there are and in which order they come: plan → weights → KV → adapter bank → scheduler → core."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import torch

from adapters.loader import PackedAdapter, load
from adapters.residency import ResidencyCache
from adapters.spec import AdapterMissing, AdapterRef, BaseShape
from adapters.storage import DirectoryStore
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.intake import SchedulerConfig
from engine.kv_cache import KVCache
from engine.lanes import Lanes
from engine.lora import LoraBank
from engine.memory_plan import MemoryPlan, adapter_bytes, plan_memory
from engine.model.base_weights import ModelBase
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops import create_ops
from engine.protocol import Ready
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler

log = logging.getLogger(__name__)


def build_core(config: EngineConfig) -> tuple[EngineCore, Ready]:
    """Loads the model and allocates everything. Raises ConfigError for what can't run or doesn't fit; what can be
    refused without reading the weights is refused before."""
    model_config = ModelConfig.from_dir(config.model)
    plan = plan_memory(config, model_config)
    log.info("%s", plan)
    ops = create_ops(plan.device, plan.dtype, model_config.head_dim, plan.block_size)
    model = load_model(config.model, model_config, ops, plan.device)
    cache = KVCache(model_config, plan.num_blocks, plan.block_size, ops.weight_dtype, plan.device)
    shape = model_config.base_shape()
    bank = LoraBank(shape, plan.adapter_bytes, ops.adapter_dtype, plan.device)
    runner = ModelRunner(model, cache, bank, Sampler(model_config.eos_token_ids), plan.device)
    largest = adapter_bytes(model_config, config.max_lora_rank, ops.adapter_dtype.itemsize)
    keep_bytes = max(0, plan.adapter_bytes - largest)
    fetch = _fetch(config, shape, ops.adapter_dtype, ModelBase(model))
    residency = ResidencyCache(bank, fetch, plan.adapter_bytes, keep_bytes=keep_bytes)
    pool = BlockPool(plan.num_blocks, plan.block_size, config.enable_prefix_caching)
    lanes = Lanes(config.max_waiting_per_lane, slack=float(config.max_batched_tokens))
    scheduler = Scheduler(_scheduler_config(config, model_config, plan), pool, residency, lanes)
    return EngineCore(scheduler, runner, residency, pool), _ready(config, model_config, plan, keep_bytes)


def _fetch(
    config: EngineConfig, shape: BaseShape, dtype: torch.dtype, base: ModelBase
) -> Callable[[AdapterRef], PackedAdapter]:
    """Reads one adapter from the store; runs in the residency's threads."""
    store = None if config.store_dir is None else DirectoryStore(config.store_dir)

    def fetch(ref: AdapterRef) -> PackedAdapter:
        if store is None:
            raise AdapterMissing("adapter_missing", "this engine has no adapter store")
        return load(store.path(ref.digest), shape, dtype, config.max_lora_rank, ref.digest, base)

    return fetch


def _scheduler_config(config: EngineConfig, model: ModelConfig, plan: MemoryPlan) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        fingerprint=model.fingerprint,
        dtype=_name(plan.dtype),
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
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
