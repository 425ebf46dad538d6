"""Thousands of adapters on few bytes: what loading costs those who wait for it and all others. A line of JSON per
part; --plot draws.

    python -m bench.adapters [--only zipf,arrivals,cold,rhythm,cost,churn] [--adapters 2000] [--resident 200] …

zipf       a Zipf(1.0) trace with adapter memory for --resident of --adapters against the same trace, segment by segment
           in turn, with every adapter that it touches already resident
arrivals   the arrangement of S-LoRA (arXiv 2311.03285): n adapters, power law of 1, Gamma arrivals of cv 1, lengths
           U[8, 512]: requests per second, first token p50 and p99, share that has it within 6 s, loads
cold       first token of an adapter that lies on disk, against one that is resident, in an idle engine
rhythm     the longest gap of 4 running streams while the largest allowed adapter loads
cost       time of a step outside the model, by requests that wait
churn      add (rank 64), call, delete: resident bytes of the process and stored adapters afterwards

The claims (exit status 1 if one does not hold): zipf ≥ 0.95; rhythm: gap ≤ 2 × median step + 20 ms; churn within 2 %,
nothing stored.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from adapters.spec import AdapterRef
from bench.driver import Driver, Request
from bench.plot import write_charts
from bench.throughput import DEMO_MODEL
from bench.zoo import Zoo, scratch
from chorus import LLM, SamplingParams
from engine.build import build_core
from engine.config import EngineConfig
from engine.garbage import settle
from engine.model.config import ModelConfig
from engine.step import Step

LARGEST_RANK = 64
AFTER_LOAD = 5
FIRST_TOKEN_LIMIT_S = 6.0


class Bench:
    """The engines and adapters of one run; engines close with it."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.options = options
        self.draw = random.Random(0)
        self._stack = stack
        self.config = ModelConfig.from_dir(options.model)
        self.root = Path(stack.enter_context(scratch()))
        self.zoo = Zoo(self.root, self.config.base_shape())
        self._registered: list[AdapterRef] = []

    def registered(self, count: int) -> list[AdapterRef]:
        """The first `count` adapters, of ranks 4 and 8 in turn."""
        while len(self._registered) < count:
            self._registered.append(self.zoo.add((4, 8)[len(self._registered) % 2]))
        return self._registered[:count]

    def engine(self, refs: list[AdapterRef], rows: int) -> Driver:
        """With adapter memory for just these."""
        config = EngineConfig(
            model=self.options.model, dtype=self.options.dtype, store_dir=self.root, enable_prefix_caching=False,
            adapter_memory_bytes=sum(ref.size_bytes for ref in refs), kv_memory_bytes=512 << 20, max_num_seqs=rows,
            max_lora_rank=max(ref.rank for ref in refs), adapter_wait_s=600.0, max_waiting_per_lane=8192,
        )  # fmt: skip
        core, ready = build_core(config)
        settle()  # as an engine's own process does
        self._stack.callback(core.close)
        driver = Driver(core, ready.vocab_size)
        driver.run([Request(16, 4)])
        return driver


def zipf_weights(count: int) -> list[float]:
    return [1 / rank for rank in range(1, count + 1)]


def zipf(bench: Bench) -> dict[str, Any]:
    """Throughput with memory for few of many adapters, over that with memory for all."""
    options = bench.options
    start = time.perf_counter()
    refs = bench.registered(options.adapters)
    made_s = time.perf_counter() - start
    start = time.perf_counter()
    small = bench.engine(refs[: options.resident], options.rows)
    start_s = time.perf_counter() - start
    popular = bench.draw.sample(refs, len(refs))
    trace = bench.draw.choices(popular, zipf_weights(len(refs)), k=options.requests)
    touched = list(dict.fromkeys(trace))
    large = bench.engine(touched, options.rows)
    large.load(touched)
    small.load(popular[: options.resident // 2])
    before = small.core.stats("")
    seconds: dict[str, list[float]] = {"small": [], "large": []}
    size = -(-len(trace) // options.segments)
    for first in range(0, len(trace), size):
        turns = [("small", small), ("large", large)]
        for name, driver in turns if first // size % 2 else turns[::-1]:  # neither is always the first
            requests = [Request(options.length, options.length, ref) for ref in trace[first : first + size]]
            seconds[name].append(driver.run(requests, max_open=256))
    after = small.core.stats("")
    tokens = len(trace) * options.length
    ratios = [large / small for small, large in zip(seconds["small"], seconds["large"], strict=True)]
    ratio = statistics.median(ratios)
    return {
        "registered": len(refs), "resident": options.resident, "touched": len(touched), "requests": len(trace),
        "made_s": round(made_s, 1), "start_s": round(start_s, 2),
        "tok_s": round(tokens / sum(seconds["small"]), 1),
        "tok_s_all_resident": round(tokens / sum(seconds["large"]), 1),
        "ratio": round(ratio, 3),
        "ratios": [round(each, 3) for each in ratios],
        "loads": after.adapter_loads_total - before.adapter_loads_total,
        "evictions": after.adapter_evictions_total - before.adapter_evictions_total, "holds": ratio >= 0.95,
    }  # fmt: skip


def arrivals(bench: Bench) -> dict[str, Any]:
    """S-LoRA's arrangement, for growing numbers of adapters."""
    options, report = bench.options, {}
    for count in (int(text) for text in options.counts.split(",")):
        refs = bench.registered(count)
        driver = bench.engine(bench.registered(options.adapters)[: options.resident], options.rows)
        shortest, longest = options.lengths
        due, requests = 0.0, []
        while due < options.seconds:
            num_prompt, num_output = bench.draw.randint(shortest, longest), bench.draw.randint(shortest, longest)
            (ref,) = bench.draw.choices(refs, zipf_weights(count))
            requests.append(Request(num_prompt, num_output, ref, due_s=due))
            due += bench.draw.gammavariate(1.0, 1 / options.rate)
        seconds = driver.run(requests)
        firsts = [request.first_token_s for request in requests]
        report[str(count)] = {
            "requests": len(requests), "requests_per_s": round(len(requests) / seconds, 2), **quantiles(firsts),
            "within_limit": round(sum(first <= FIRST_TOKEN_LIMIT_S for first in firsts) / len(firsts), 3),
            "loads": driver.core.stats("").adapter_loads_total,
        }  # fmt: skip
    return report


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"p{share}_ms": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 1)
        for share in (50, 99)
    }


def cold(bench: Bench) -> dict[str, Any]:
    """First token when nothing else runs."""
    refs = bench.registered(min(bench.options.adapters, 50))
    driver = bench.engine(refs, bench.options.rows)
    times = []
    for _ in range(2):  # from disk, then from memory
        requests = [Request(64, 2, ref) for ref in refs]
        driver.run(requests, max_open=1)
        times.append([request.first_token_s for request in requests])
    return {"cold": quantiles(times[0]), "resident": quantiles(times[1])}


def rhythm(bench: Bench) -> dict[str, Any]:
    """The longest pause of running streams while one of the largest adapters loads, a few times; and in as many steps
    without a load, behind each: the machine's own pauses."""
    largest = [bench.zoo.add(LARGEST_RANK) for _ in range(bench.options.loads)]
    driver = bench.engine(largest[:2] * 2, 8)
    streams = [Request(32, 200 + 200 * bench.options.loads) for _ in range(4)]
    for stream in streams:
        driver.send(stream)
    while len(streams[-1].token_times) < 100:
        driver.step()
    median = statistics.median(gaps(streams[0], 20))
    longest, calm = [], []
    for ref in largest:
        loads = driver.core.stats("").adapter_loads_total
        seen, steps = len(streams[0].token_times), AFTER_LOAD
        driver.core.warm(ref)
        while driver.core.stats("").adapter_loads_total == loads:
            driver.step()
            steps += 1
        for _ in range(AFTER_LOAD):
            driver.step()
        longest.append(longest_gap(streams, seen))
        seen = len(streams[0].token_times)
        for _ in range(steps):
            driver.step()
        calm.append(longest_gap(streams, seen))
    limit = 2 * median + 0.020
    return {
        "bytes": largest[0].size_bytes, "median_step_ms": round(1000 * median, 1),
        "longest_gap_ms": [round(1000 * gap, 1) for gap in longest],
        "without_load_ms": [round(1000 * gap, 1) for gap in calm], "limit_ms": round(1000 * limit, 1),
        "holds": max(longest) <= limit,
    }  # fmt: skip


def longest_gap(streams: list[Request], seen: int) -> float:
    """Of the tokens behind the first `seen`."""
    return max(max(gaps(stream, seen - 1)) for stream in streams)


def gaps(stream: Request, first: int) -> list[float]:
    times = stream.token_times[first:]
    return [after - before for before, after in pairwise(times)]


class Timed:
    """A runner that knows how long it ran."""

    def __init__(self, runner: Any) -> None:
        self.seconds = 0.0
        self._runner = runner

    def run(self, step: Step) -> Any:
        start = time.perf_counter()
        result = self._runner.run(step)
        self.seconds += time.perf_counter() - start
        return result


def cost(bench: Bench) -> dict[str, Any]:
    """Milliseconds that a step takes outside the model, by the number of waiting requests (each of another adapter)."""
    report = {}
    refs = bench.registered(bench.options.adapters)
    for waiting in (16, 256, 4096):
        driver = bench.engine(refs[: bench.options.resident], bench.options.rows)
        for index in range(waiting):
            driver.send(Request(16, 64, refs[index % min(len(refs), bench.options.resident // 2)]))
        for _ in range(20):
            driver.step()
        runner = driver.core._runner
        timed = Timed(runner)
        driver.core._runner = timed
        start = time.perf_counter()
        for _ in range(60):
            driver.step()
        report[str(waiting)] = round(1000 * (time.perf_counter() - start - timed.seconds) / 60, 3)
        driver.core._runner = runner
    return report


def churn(bench: Bench) -> dict[str, Any]:
    """Resident bytes after many adapters have come and gone, over those after the first tenth."""
    cycles = bench.options.cycles
    directory = bench.root / "source"
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with LLM(bench.options.model, dtype=bench.options.dtype, max_num_seqs=2, adapter_memory="512MiB") as llm:
        before = 0
        for index in range(cycles):
            ref = llm.add_adapter(bench.zoo.write(directory, LARGEST_RANK))
            llm.generate("hello", params, ref)
            llm.remove_adapter(ref)
            if index == cycles // 10:
                before = resident_bytes()
        after = resident_bytes()
        used, stored = llm.stats.adapter_bytes_used, len(llm._store.digests())
    return {"cycles": cycles, "before_mb": before >> 20, "after_mb": after >> 20, "extent_bytes": used,
            "stored": stored, "holds": after <= 1.02 * before and used == stored == 0}  # fmt: skip


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PARTS = {"zipf": zipf, "arrivals": arrivals, "cold": cold, "rhythm": rhythm, "cost": cost, "churn": churn}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--resident", type=int, default=200, help="adapters that there is memory for")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1000, help="of zipf")
    parser.add_argument("--length", type=int, default=64, help="of prompts and outputs of zipf, tokens")
    parser.add_argument("--segments", type=int, default=4, help="of zipf")
    parser.add_argument("--counts", default="5,100,1000,2000", help="adapters of arrivals")
    parser.add_argument("--lengths", type=int, nargs=2, default=(8, 512), help="of prompts and outputs of arrivals")
    parser.add_argument("--rate", type=float, default=0.6, help="requests per second of arrivals")
    parser.add_argument("--seconds", type=float, default=90.0, help="of arrivals, per number of adapters")
    parser.add_argument("--loads", type=int, default=5, help="of rhythm")
    parser.add_argument("--cycles", type=int, default=500, help="of churn")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def draw(path: Path, report: dict[str, dict[str, Any]]) -> None:
    lines = {name: [(float(count), float(one[name])) for count, one in report.items()] for name in ("p50_ms", "p99_ms")}
    rate = {"requests_per_s": [(float(count), float(one["requests_per_s"])) for count, one in report.items()]}
    write_charts(
        path,
        [("first token, S-LoRA's arrangement", "adapters", "ms", lines), ("throughput", "adapters", "req/s", rate)],
    )


def main() -> int:
    options = parse_options()
    holds = True
    for name in options.only.split(","):
        with ExitStack() as stack:
            report = PARTS[name](Bench(options, stack))
        about = {"bench": "adapters", "model": options.model.name, "dtype": options.dtype}
        print(json.dumps(about | {name: report}), flush=True)
        holds &= report.get("holds", True)
        if options.plot and name == "arrivals":
            draw(options.plot, report)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
