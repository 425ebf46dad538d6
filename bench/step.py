"""Where the milliseconds of a decode step go, as JSON: median and least of many steps, by part; every row decodes.

    python -m bench.step [--model DIR] [--rows 32] [--context 256] [--adapters N --rank R] [--resident N]
                         [--temperature T --top-p P] [--quantization int8|int4] [--threads N] [--clock wall|cpu]

Parts: schedule (which rows run), batch (lay them out), model (embedding and layers), logits (last norm and head),
sample, commit (tokens appended, what is said). `outside_share` is what is neither model, logits nor sample, the median
of the steps' own shares. --adapters N: row i uses adapter i mod N; --resident N: so many more are loaded and unused.
With --clock cpu only the calling thread's time counts and one thread computes: a figure that other processes on the
machine do not change much.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.throughput import DEMO_MODEL, adapters_of
from chorus import LLM, SamplingParams

PARTS = ("schedule", "batch", "model", "logits", "sample", "commit")


class Stopwatch:
    """Seconds by part of every step, and of whole steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self.num_rows: list[int] = []
        """How many rows each step had, and none where one was a prompt's."""

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Counts the time of a method or function as the part's."""
        inner = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            start = self._clock()
            try:
                return inner(*args, **named)
            finally:
                self._step[part] = self._step.get(part, 0.0) + self._clock() - start

        setattr(owner, name, timed)

    def watch_steps(self, core: Any) -> None:
        inner = core.step

        def step() -> Any:
            self._step = {}
            start = self._clock()
            result = inner()
            self.steps.append({**self._step, "step": self._clock() - start})
            return result

        def schedule(now: float) -> Any:
            planned = plan(now)
            rows = () if planned is None else planned.rows
            self.num_rows.append(len(rows) if all(row.num_tokens == 1 for row in rows) else 0)
            return planned

        plan, core._scheduler.schedule = core._scheduler.schedule, schedule

        core.step = step


def install(llm: LLM, clock: Callable[[], float]) -> Stopwatch:
    watch, core = Stopwatch(clock), llm._core
    runner: Any = core._runner
    watch.watch(core._scheduler, "schedule", "schedule")
    watch.watch(core._scheduler, "commit", "commit")
    watch.watch(runner._builder, "build", "batch")
    watch.watch(runner._model, "forward", "model")
    watch.watch(runner._model, "logits", "logits")
    watch.watch(runner._sampler, "sample", "sample")
    watch.watch_steps(core)
    return watch


def decode_steps(llm: LLM, options: argparse.Namespace, watch: Stopwatch) -> list[dict[str, float]]:
    """The steps in which every row decodes, the first two left out: rows whose prompts went first end first."""
    own = adapters_of(llm, options.model, options.adapters + options.resident, options.rank)
    refs = own[: options.adapters] or [None]
    if options.resident:  # loaded once, by a token each
        one = SamplingParams(max_tokens=1)
        llm.generate([[5]] * options.resident, one, own[options.adapters :], show_progress=False)
    vocabulary = llm.ready.vocab_size
    prompts = [[random.randrange(100, vocabulary) for _ in range(options.context)] for _ in range(options.rows)]
    num_prompt_steps = -(-options.rows * options.context // llm.config.max_batched_tokens)
    max_tokens = options.steps + 4 + num_prompt_steps
    params = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, max_tokens=max_tokens, ignore_eos=True
    )
    watch.steps.clear()
    watch.num_rows.clear()
    llm.generate(prompts, params, [refs[i % len(refs)] for i in range(options.rows)], show_progress=False)
    whole = [step for step, rows in zip(watch.steps, watch.num_rows, strict=True) if rows == options.rows]
    return whole[2 : options.steps + 2]


def report(steps: list[dict[str, float]]) -> dict[str, Any]:
    median = {part: statistics.median(step.get(part, 0.0) for step in steps) for part in (*PARTS, "step")}
    least = {part: min(step.get(part, 0.0) for step in steps) for part in (*PARTS, "step")}
    inside = (sum(step.get(part, 0.0) for part in ("model", "logits", "sample")) / step["step"] for step in steps)
    return {
        "median_ms": {part: round(seconds * 1e3, 3) for part, seconds in median.items()},
        "least_ms": {part: round(seconds * 1e3, 3) for part, seconds in least.items()},
        "outside_share": round(1.0 - statistics.median(inside), 4),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--resident", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    random.seed(0)
    wanted = 1 if options.clock == "cpu" else options.threads
    if wanted != torch.get_num_threads():  # called at all, it makes a step of 32 rows 7 ms longer
        torch.set_num_threads(wanted)
    with LLM(options.model, quantization=options.quantization, max_num_seqs=options.rows, adapter_memory="1GiB") as llm:
        watch = install(llm, time.perf_counter if options.clock == "wall" else time.thread_time)
        steps = decode_steps(llm, options, watch)
    asked = {name: value for name, value in vars(options).items() if name != "model"}
    print(json.dumps({**asked, "threads": torch.get_num_threads(), **report(steps)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
