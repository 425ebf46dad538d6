"""Time: of a call as the card takes it, and what the card reaches at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def seconds_of(launch: Callable[[], Any], bench_device: str, num_repeats: int) -> float:
    """Of one call, launched from a CUDA graph: what the card takes, not what Python takes to launch."""
    launch()
    if bench_device == "cpu":
        start = time.perf_counter()
        launch()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start_event.record()
    for _ in range(num_repeats):
        graph.replay()
    end_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(end_event) / 1e3 / num_repeats)


def rates(device: str, dtype: torch.dtype, is_toy: bool) -> tuple[float, float]:
    """Bytes per second of a large copy (read and written), floating-point operations per second of a large product."""
    size = 1 << (12 if is_toy else 29)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = seconds_of(lambda: target.copy_(source), device, 10)
    width = 64 if is_toy else 8192
    matrix = torch.ones(width, width, dtype=dtype, device=device)
    product_s = seconds_of(lambda: matrix @ matrix, device, 10)
    return 2 * size / copy_s, 2 * width**3 / product_s
