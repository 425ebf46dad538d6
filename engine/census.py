"""take_census(): what an engine tells about itself once a second. Looks at lanes and rows, never at every request."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from adapters.residency import ResidencyCache
from engine.block_pool import BlockPool
from engine.kv_tiers import KVTiers
from engine.lane import Lane
from engine.protocol import AdapterState, ClassState, LaneState, Stats, TierState
from engine.scheduler import Scheduler

MAX_LANES = 64
"""Of so many lanes, those that had most service, it is told how they are served."""
PRIORITIES = (0, 1, 2)


def take_census(
    boot_id: str, now: float, num_steps: int, scheduler: Scheduler, residency: ResidencyCache, pool: BlockPool
) -> Stats:
    lanes, holding = list(scheduler.lanes), scheduler.holding
    classes = _classes(scheduler, lanes)
    return Stats(
        boot_id=boot_id,
        running=len(holding.rows),
        waiting=sum(one.paused + one.waiting_row + one.waiting_blocks + one.waiting_adapter for one in classes),
        waiting_adapter=sum(one.waiting_adapter for one in classes),
        blocks_total=pool.num_blocks,
        blocks_used=pool.num_used,
        blocks_cached=pool.num_cached,
        preemptions_total=scheduler.num_preemptions,
        steps_total=num_steps,
        prompt_tokens_total=scheduler.num_prompt_tokens,
        cached_tokens_total=scheduler.admission.num_cached_tokens,
        generated_tokens_total=scheduler.progress.num_generated_tokens,
        adapter_bytes_total=residency.budget_bytes,
        adapter_bytes_used=residency.used_bytes,
        adapter_bytes_host=residency.host_bytes,
        adapter_loads_total=residency.num_loads,
        adapter_evictions_total=residency.num_evictions,
        adapter_read_seconds_total=residency.read_s,
        adapter_place_seconds_total=residency.place_s,
        adapters=[AdapterState(*state) for state in residency.states(now)],
        classes=classes,
        lanes=_lanes(lanes),
        preemptions={"pause": holding.num_pauses, **holding.num_recomputes},
        failures=dict(scheduler.num_failures),
        arrivals=dict(scheduler.num_arrivals),
        kv_tiers=list(_tiers(scheduler.tiers)),
        resumed=dict(scheduler.tiers.resumed),
        speeds=_speeds(scheduler.tiers) if scheduler.tiers.host.num_slots else {},
    )


def _tiers(tiers: KVTiers) -> Iterator[TierState]:
    host, disk, block = tiers.host, tiers.disk, tiers.cost.block_bytes
    if host.num_slots:
        yield TierState(
            "host", host.num_filled, host.num_filled * block, host.num_slots * block,
            tiers.num_loads, tiers.num_stores, host.num_evictions, 0,
        )  # fmt: skip
    if disk is not None:
        index = disk.index
        yield TierState(
            "disk", len(index), index.used_bytes, index.limit_bytes,
            disk.num_hits, disk.num_writes, index.num_evictions, disk.num_faults,
        )  # fmt: skip


def _speeds(tiers: KVTiers) -> dict[str, float]:
    cost = tiers.cost
    return {
        "copy_bytes": cost.copy_speed, "disk_bytes": cost.disk_speed, "prefill_tokens": cost.compute_speed,
    }  # fmt: skip


def _classes(scheduler: Scheduler, lanes: Iterable[Lane]) -> list[ClassState]:
    """Whoever waits for its turn waits for a row if all are taken, else for blocks."""
    holding = scheduler.holding
    running = Counter(one.rank[0] for one in holding.rows)
    paused = Counter(one.rank[0] for one in holding.paused)
    swapped = Counter(one.rank[0] for one in holding.stripped)
    queued: Counter[int] = Counter()
    parked: Counter[int] = Counter()
    for lane in lanes:
        queued[lane.priority] += lane.num_queued
        parked[lane.priority] += len(lane.parked)
    has_row = holding.has_row
    return [
        ClassState(
            one, running[one], paused[one], 0 if has_row else queued[one] - paused[one],
            queued[one] - paused[one] if has_row else 0, parked[one], swapped[one],
        )
        for one in PRIORITIES
    ]  # fmt: skip


def _lanes(lanes: Iterable[Lane]) -> list[LaneState]:
    busiest = heapq.nlargest(MAX_LANES, lanes, key=lambda lane: lane.service)
    return [
        LaneState(
            lane.name, lane.priority, lane.num_running, lane.num_queued + len(lane.parked), lane.service, lane.counter
        )
        for lane in busiest
    ]  # fmt: skip
