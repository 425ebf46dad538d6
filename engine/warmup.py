"""warm_up(): steps of every size, run before the first request, so that kernels are compiled and CUDA graphs captured
while nobody waits. Knows no graph: it runs steps."""

from __future__ import annotations

import logging
import time

import torch

from adapters.loader import NUM_FIELDS, UNIT, PackedAdapter
from adapters.spec import MODULES, AdapterRef
from engine.lora import LoraBank
from engine.ops.graphs import decode_sizes
from engine.params import SamplingParams
from engine.sequence import Sequence
from engine.step import Row, Runner, Step

log = logging.getLogger(__name__)

BUDGET_S = 30.0
"""Sizes that are not reached by then are captured when they first come."""

DIGEST = "warm-up"


def warm_up(
    runner: Runner, bank: LoraBank, nothing: PackedAdapter, steps: list[tuple[int, int]], block_size: int
) -> int:  # fmt: skip
    """Runs steps of (rows, tokens of each), in this order, each without and (where the bank has room) with an adapter.
    Blocks are written, so nobody may use them yet. Returns how many it ran."""
    started, num_run, left = time.perf_counter(), 0, list(steps)
    refs = [None, AdapterRef(DIGEST)] if nothing.size_bytes <= bank.budget_bytes else [None]
    if len(refs) > 1:
        bank.place(DIGEST, nothing)
    while left and time.perf_counter() - started < BUDGET_S:
        for ref in refs:
            runner.run(_step(*left[0], ref, block_size))
            num_run += 1
        left.pop(0)
    if len(refs) > 1:
        bank.evict(DIGEST)
    rest = f"; {len(left)} sizes are captured when they first come" if left else ""
    log.info("%d steps ready after %.1f s%s", num_run, time.perf_counter() - started, rest)
    return num_run


def steps_to_warm(max_rows: int, max_tokens: int, num_blocks: int, block_size: int) -> list[tuple[int, int]]:
    """(rows, tokens of each): a long chunk and a short one, then decode steps of every size that has a graph, the
    largest first, as smaller graphs live in its memory."""
    longest = min(max_tokens, num_blocks * block_size)
    return [(1, longest), (1, min(2, longest)), *((rows, 1) for rows in decode_sizes(min(max_rows, num_blocks))[::-1])]


def no_adapter(num_layers: int, dtype: torch.dtype) -> PackedAdapter:
    """One that changes nothing."""
    directory = torch.zeros(num_layers + 1, len(MODULES), NUM_FIELDS, dtype=torch.int64)
    buffer = torch.zeros(UNIT, dtype=dtype)
    return PackedAdapter(buffer, directory, buffer.nbytes, 1)


def _step(num_rows: int, num_tokens: int, ref: AdapterRef | None, block_size: int) -> Step:
    """Each row in blocks of its own, and each drawn."""
    params, num_blocks = SamplingParams(max_tokens=1, temperature=1.0), -(-num_tokens // block_size)
    rows = []
    for index in range(num_rows):
        blocks = list(range(index * num_blocks, (index + 1) * num_blocks))
        sequence = Sequence("", 0, [0] * num_tokens, num_tokens, params, 0, adapter=ref, blocks=blocks)
        rows.append(Row(sequence, 0, num_tokens, True))
    return Step(tuple(rows))
