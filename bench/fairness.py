"""Fairness: what a heavy tenant does to a light one, on a real engine in this process. JSON on stdout, --plot draws.

    python -m bench.fairness [--model DIR] [--rows 8] [--requests 200] [--loads 10,100] [--plot fairness.svg]

solo         the light tenant alone: first-token times of requests of 32+16 tokens, one at a time
fair         the same while a heavy tenant keeps `load` times the rows waiting (64+200 tokens)
unfair       two of them with both in one lane: first come, first served
inversion    all rows held by the lowest class: first-token times of the highest
weights      three tenants with weights 1 : 2 : 4 that want all rows: their service

The claims (exit status 1 if they don't hold): p99 with the heavy tenant ≤ 5 × solo; at the largest load ≤ 1.2 × that at
the smallest; service by weights within 15 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plot import Lines, write_charts
from engine.build import build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.garbage import settle
from engine.params import SamplingParams
from engine.protocol import Chunk, Generate

DEMO_MODEL = Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct"


@dataclass
class Tenant:
    """Sends requests of one shape in its lane, and knows when what came back."""

    lane: str
    num_prompt: int
    num_output: int
    priority: int = 1
    weight: float = 1.0
    open: dict[str, float] = field(default_factory=dict)
    first_s: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


class Bench:
    """One engine, driven step by step; requests are added and chunks taken up between steps."""

    def __init__(self, core: EngineCore, vocab_size: int) -> None:
        self.core = core
        self.draw = random.Random(0)
        self._vocab_size = vocab_size
        self._count = 0
        self._owner: dict[str, Tenant] = {}

    def send(self, tenant: Tenant) -> None:
        self._count += 1
        id = str(self._count)
        prompt = [self.draw.randrange(100, self._vocab_size) for _ in range(tenant.num_prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=tenant.num_output, ignore_eos=True)
        self._owner[id] = tenant
        tenant.open[id] = time.perf_counter()
        self.core.add(
            Generate(
                id=id, prompt=prompt, params=params, lane=tenant.lane, priority=tenant.priority, weight=tenant.weight
            )
        )

    def step(self) -> None:
        for chunk in self.core.step():
            assert isinstance(chunk, Chunk), chunk
            tenant, now = self._owner[chunk.id], time.perf_counter()
            tenant.tokens += [now] * len(chunk.ids)
            if chunk.start == 0:
                tenant.first_s.append((now, now - tenant.open[chunk.id]))
            if chunk.finish is not None:
                del tenant.open[chunk.id], self._owner[chunk.id]

    def clear(self) -> None:
        for id in list(self._owner):
            self.core.abort(id)
        self._owner.clear()

    def one_by_one(self, tenant: Tenant, count: int, background: Callable[[], None], limit_s: float) -> None:
        """`count` requests, each sent when the one before has ended, after a pause of up to 20 steps."""
        end = time.perf_counter() + limit_s
        while len(tenant.first_s) < count and time.perf_counter() < end:
            for _ in range(self.draw.randrange(20)):
                background()
                self.step()
            self.send(tenant)
            while tenant.open and time.perf_counter() < end:
                background()
                self.step()


def keep(bench: Bench, tenant: Tenant, count: int) -> Callable[[], None]:
    """As many of its requests are always under way."""

    def fill() -> None:
        while len(tenant.open) < count:
            bench.send(tenant)

    return fill


def quantile(tenant: Tenant, share: float) -> float:
    times = sorted(seconds for _, seconds in tenant.first_s) or [math.inf]
    return times[min(len(times) - 1, int(share * len(times)))]


def first_tokens(tenant: Tenant) -> dict[str, Any]:
    if not tenant.first_s:
        return {"requests": 0}
    return {
        "requests": len(tenant.first_s),
        "p50_ms": round(1e3 * quantile(tenant, 0.5), 1),
        "p99_ms": round(1e3 * quantile(tenant, 0.99), 1),
    }


def contend(bench: Bench, options: argparse.Namespace, load: int, heavy_lane: str) -> tuple[Tenant, Tenant, float]:
    """The light tenant beside the heavy one; when it began."""
    light, heavy = Tenant("light", 32, 16), Tenant(heavy_lane, 64, 200)
    background = keep(bench, heavy, load * options.rows)
    for _ in range(30):
        background()
        bench.step()
    start = time.perf_counter()
    count = options.requests if heavy_lane != light.lane else 2
    bench.one_by_one(light, count, background, options.limit)
    bench.clear()
    return light, heavy, start


def invert(bench: Bench, options: argparse.Namespace) -> Tenant:
    """The highest class while the lowest holds all rows."""
    low, high = Tenant("low", 64, 200, priority=2), Tenant("high", 32, 16, priority=0)
    bench.one_by_one(high, options.requests // 4, keep(bench, low, 4 * options.rows), options.limit)
    bench.clear()
    return high


def share_by_weight(bench: Bench, options: argparse.Namespace) -> tuple[dict[float, float], Lines, float]:
    """Service of three tenants that always have work, per weight."""
    tenants = [Tenant(f"weight {weight:g}", 32, 32, weight=weight) for weight in (1.0, 2.0, 4.0)]
    start = time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        for tenant in tenants:
            keep(bench, tenant, 2 * options.rows)()
        bench.step()
    bench.clear()
    service = {one.weight: float(len(one.tokens)) for one in tenants}
    lines = {one.lane: list(cumulated(one.tokens, start)) for one in tenants}
    return service, lines, time.perf_counter() - start


def cumulated(times: list[float], start: float) -> Iterator[tuple[float, float]]:
    """(seconds, tokens so far), twice a second."""
    buckets: defaultdict[int, int] = defaultdict(int)
    for moment in times:
        buckets[int(2 * (moment - start))] += 1
    total = 0
    for bucket in range(max(buckets, default=0) + 1):
        total += buckets[bucket]
        yield bucket / 2, float(total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--loads", default="10,100")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measurement of weights")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one series")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    core, ready = build_core(
        EngineConfig(
            model=options.model, dtype=options.dtype, max_num_seqs=options.rows, enable_prefix_caching=False,
            max_waiting_per_lane=8192,
        )
    )  # fmt: skip
    settle()  # as an engine's own process does
    bench = Bench(core, ready.vocab_size)
    report, charts = measure(bench, options)
    report |= {"model": ready.model, "dtype": ready.dtype, "device": ready.device, "rows": options.rows}
    print(json.dumps(report))
    if options.plot:
        write_charts(options.plot, charts)
    core.close()
    return 0 if all(report["holds"].values()) else 1


def measure(bench: Bench, options: argparse.Namespace) -> tuple[dict[str, Any], list[tuple[str, str, str, Lines]]]:
    warm, solo = Tenant("warm", 32, 16), Tenant("light", 32, 16)
    bench.one_by_one(warm, 3, lambda: None, options.limit)
    bench.one_by_one(solo, options.requests, lambda: None, options.limit)
    report: dict[str, Any] = {"bench": "fairness", "solo": first_tokens(solo), "fair": {}}
    charts: list[tuple[str, str, str, Lines]] = []
    p99 = []
    for load in map(int, options.loads.split(",")):
        light, heavy, start = contend(bench, options, load, "heavy")
        p99.append(quantile(light, 0.99))
        report["fair"][f"{load}x"] = first_tokens(light)
        lines = {
            "light": [(now - start, 1e3 * seconds) for now, seconds in light.first_s],
            "solo p99": [(0.0, 1e3 * quantile(solo, 0.99)), (light.first_s[-1][0] - start, 1e3 * quantile(solo, 0.99))],
        }
        charts.append((f"first token of the light tenant, heavy load {load}×", "seconds", "ms", lines))
        service = {one.lane: list(cumulated(one.tokens, start)) for one in (light, heavy)}
        charts.append((f"service, heavy load {load}×", "seconds", "tokens", service))
    report["unfair"] = first_tokens(contend(bench, options, int(options.loads.split(",")[0]), "light")[0])
    report["inversion"] = first_tokens(invert(bench, options))
    shares, lines, seconds = share_by_weight(bench, options)
    charts.append(("service with weights 1 : 2 : 4", "seconds", "tokens", lines))
    unit = sum(shares.values()) / sum(shares)
    report["weights"] = {f"{weight:g}": round(tokens / unit, 3) for weight, tokens in shares.items()}
    report["weights_tok_s"] = round(sum(shares.values()) / seconds, 1)
    solo_p99 = quantile(solo, 0.99)
    report["fair_over_solo"] = [round(one / solo_p99, 2) for one in p99]
    report["holds"] = {
        "light_within_5_times_solo": max(p99) <= 5 * solo_p99,
        "load_does_not_matter": p99[-1] <= 1.2 * p99[0],
        "service_by_weight": all(abs(tokens / unit / weight - 1) <= 0.15 for weight, tokens in shares.items()),
    }
    return report, charts


if __name__ == "__main__":
    sys.exit(main())
