"""From an EngineConfig to KV tiers: which there are, how fast they are, and what kind of bytes lies in a block."""

from __future__ import annotations

import hashlib
import time

import torch

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.cost_model import CostModel
from engine.kv_cache import KVCache
from engine.kv_disk import DiskTier
from engine.kv_disk_index import DiskIndex
from engine.kv_host import HostMemory
from engine.kv_host_pool import HostPool
from engine.kv_tiers import KVTiers, no_tiers
from engine.kv_traffic import DiskTraffic
from engine.memory_plan import MemoryPlan
from engine.ops import Ops
from engine.params import SamplingParams
from engine.sequence import Sequence
from engine.step import Row, Runner, Step

MEASURED_BLOCKS = 16
MEASURED_TOKENS = 256


def build_tiers(
    config: EngineConfig, plan: MemoryPlan, pool: BlockPool, cache: KVCache
) -> tuple[KVTiers, HostMemory | None]:
    """Without host memory, or without a prefix cache, there are no tiers. Raises ConfigError for a disk directory that
    can't be used."""
    if not plan.host_kv_bytes or not config.enable_prefix_caching:
        return no_tiers(pool), None
    num_slots = plan.host_kv_bytes * plan.num_blocks // plan.kv_bytes
    block_bytes = plan.kv_bytes // plan.num_blocks
    cost = CostModel(block_bytes, plan.block_size, copy_speed=1e9, compute_speed=1e3)
    host = HostMemory(cache, num_slots, cost.note_copy)
    if config.kv_disk_dir is None:
        return KVTiers(pool, HostPool(num_slots), cost, config.swap), host
    disk = DiskTier(config.kv_disk_dir, host.slot_bytes, host.view)
    cost.disk_speed = disk.measure(min(MEASURED_BLOCKS, num_slots)) or cost.disk_speed
    index, slots = DiskIndex(config.kv_disk_bytes, disk.scan()), HostPool(num_slots)
    traffic = DiskTraffic(disk, index, slots, cost, always=config.swap == "on")
    return KVTiers(pool, slots, cost, config.swap, traffic), host


def measure(cost: CostModel, runner: Runner, host: HostMemory, max_tokens: int) -> None:
    """Computes a prompt and copies some blocks, twice, for what happens but once; nobody uses the memory yet."""
    num_blocks = min(MEASURED_BLOCKS, host.num_blocks, host.num_slots)
    num_tokens = min(MEASURED_TOKENS, max_tokens, num_blocks * cost.block_size)
    sequence = Sequence("", 0, [0] * num_tokens, num_tokens, SamplingParams(), 0, blocks=list(range(num_blocks)))
    pairs = [(index, index) for index in range(num_blocks)]
    for _ in range(2):
        started = time.perf_counter()
        runner.run(Step((Row(sequence, 0, num_tokens, samples=False),)))
        computed = time.perf_counter()
        host.store(pairs)
        host.load(pairs)
        cost.copy_speed = 2 * num_blocks * host.slot_bytes / (time.perf_counter() - computed)
        cost.compute_speed = num_tokens / (computed - started)


def kv_layout(ops: Ops, cache: KVCache) -> str:
    """Says in which order these ops keep a block: blocks of another order must never be read as theirs. Found by
    writing one, so that it can't be forgotten to change it."""
    layer = cache.layers[0]
    shape = (cache.block_size, *layer.shape[2:])
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(shape, generator=draw).to(layer.device, ops.activation_dtype) for _ in range(2))
    block = torch.zeros((2, *shape), dtype=layer.dtype, device=layer.device)
    ops.write_kv(k, v, block, torch.arange(cache.block_size, device=layer.device))
    digest = hashlib.sha256(block.cpu().view(torch.uint8).numpy().tobytes())
    digest.update(f"{len(cache.layers)} {shape}".encode())
    return digest.hexdigest()[:16]
