"""Chorus and its peers on equal workloads, in turn in one go: first what each computes is checked against transformers
and peft in fp32, then figures are printed, as a table and as JSON.

    bench/peers/prepare.sh DIR
    python -m bench.peers DIR [--only base,1-row] [--rounds 3] [--json FILE] [--plot FILE.svg]

Greedy, bf16, no prefix cache, equal prompts. Every engine is a process of its own; while one runs, the others are
stopped. A ratio is the median over rounds of the two figures of that round. The exit status is 1 if a claim does not
hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bench.plot import Lines, write_charts
from bench.throughput import DEMO_MODEL, write_adapter
from bench.workloads import WORKLOADS, Contestant, Goal, Workload
from engine.model.config import ModelConfig

HERE = Path(__file__).parent
SCRIPTS = {"chorus": "chorus_llm.py", "vllm": "vllm_cpu.py", "peft": "peft_hf.py", "llama": "llama.py"}
JOB_LIMIT_S = 600.0
CHECKED_TOKENS = 16
"""Of every row."""


class WrongOutput(Exception):
    """An engine made a token that transformers and peft would not have made."""


class Worker:
    """One engine's process. It runs only while it is asked something."""

    def __init__(self, python: Path, script: str, setup: dict[str, Any], peers: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(HERE.parent) if script == "chorus_llm.py" else ""}
        if script == "vllm_cpu.py":
            environment |= _vllm_environment(peers)
        self._process = subprocess.Popen(
            [python, HERE / "peers" / script, json.dumps(setup)], text=True, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.load_s: float = self._read(python)["load_s"]
        self._signal(signal.SIGSTOP)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """{"seconds", "answers"} of one job."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._read(job["output_len"])
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _read(self, asked: object) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(JOB_LIMIT_S, self._signal, [signal.SIGKILL])
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise RuntimeError(f"no answer within {JOB_LIMIT_S:.0f} s, or ended: {self._process.args} ({asked})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _vllm_environment(peers: Path) -> dict[str, str]:
    """Its documentation's advice for CPUs: tcmalloc, Intel's OpenMP, bound threads."""
    libraries = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), peers / "vllm" / "lib" / "libiomp5.so"]
    preload = ":".join(str(path) for path in libraries if path.exists())
    cores = sorted(os.sched_getaffinity(0))
    return {"LD_PRELOAD": preload, "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}"}


class Stage:
    """Starts the processes of one workload, each once, and ends them all."""

    def __init__(self, workload: Workload, model: Path, peers: Path, adapters: list[str]) -> None:
        self._workload = workload
        self._model = model
        self._peers = peers
        self._adapters = adapters
        self._workers: dict[Contestant, Worker] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def run(self, contestant: Contestant, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        job = {"prompts": prompts, "output_len": output_len, "adapters": self._workload.rows(contestant)}
        return self._worker(contestant).ask(job)

    def load_s(self, contestant: Contestant) -> float:
        return self._worker(contestant).load_s

    def judge(self, contestant: Contestant, prompts: list[list[int]], made: list[list[int]]) -> list[list[float]]:
        """By how much the fp32 logit of each made token, after those before it, is less than the best one."""
        setup = self._setup(contestant) | {"model": str(self._model), "oracle": True}
        oracle = Worker(self._peers / "peft" / "bin" / "python", SCRIPTS["peft"], setup, self._peers)
        rows = self._workload.rows(contestant)
        try:
            shortfalls: list[list[float]] = oracle.ask(
                {"prompts": prompts, "made": made, "adapters": rows, "output_len": 0}
            )["answers"]
        finally:
            oracle.close()
        return shortfalls

    def _worker(self, contestant: Contestant) -> Worker:
        """Contestants that differ only in which adapters they use share a process."""
        key = Contestant(contestant.engine, contestant.loaded, 0, contestant.options)
        if key not in self._workers:
            own = contestant.engine == "chorus"
            python = Path(sys.executable) if own else self._peers / contestant.engine / "bin" / "python"
            self._workers[key] = Worker(python, SCRIPTS[contestant.engine], self._setup(contestant), self._peers)
            self.run(contestant, self._workload.prompts(-1), min(4, self._workload.output_len))  # warm
        return self._workers[key]

    def _setup(self, contestant: Contestant) -> dict[str, Any]:
        model = self._peers / "model.gguf" if contestant.engine == "llama" else self._model
        return {
            "model": str(model), "batch": self._workload.batch, "max_len": self._workload.max_len,
            "adapters": self._adapters[: contestant.loaded], "options": dict(contestant.options),
        }  # fmt: skip


def check(name: str, contestant: Contestant, shortfalls: list[list[float]]) -> float:
    """The largest shortfall. Raises WrongOutput where it is more than rounding explains."""
    for row, of_row in enumerate(shortfalls):
        for position, shortfall in enumerate(of_row):
            if not shortfall <= contestant.tolerance:
                raise WrongOutput(f"{name}: row {row}, token {position}: its logit is {shortfall:.2f} below the best")
    return max(max(of_row) for of_row in shortfalls)


def measure(stage: Stage, workload: Workload, contestant: Contestant, prompts: list[list[int]]) -> float:
    """One figure in the workload's unit."""
    whole = stage.run(contestant, prompts, workload.output_len)["seconds"]
    if workload.metric == "tok_s":
        return float(workload.batch * workload.output_len / whole)
    if workload.metric == "prefill_tok_s":
        return float(workload.batch * workload.prompt_len / whole)
    first = stage.run(contestant, prompts, 1)["seconds"]
    step_s = (whole - first) / (workload.output_len - 1)
    return float(step_s * 1000 if workload.metric == "step_ms" else workload.batch / step_s)


def verdict(goal: Goal, figures: dict[str, list[float]]) -> dict[str, Any]:
    pairs = list(zip(figures[goal.who], figures[goal.than], strict=True))
    if goal.at_most is not None:
        more = statistics.median(who - than for who, than in pairs)
        return {"who": goal.who, "than": goal.than, "more_ms": round(more, 2), "at_most": goal.at_most,
                "holds": more <= goal.at_most}  # fmt: skip
    assert goal.at_least is not None
    ratio = statistics.median(who / than for who, than in pairs)
    return {"who": goal.who, "than": goal.than, "ratio": round(ratio, 2), "at_least": goal.at_least,
            "holds": ratio >= goal.at_least}  # fmt: skip


def run_workload(stage: Stage, workload: Workload, rounds: int) -> dict[str, Any]:
    """Checks every contestant's tokens, then takes `rounds` figures of each, in turn."""
    checked = {}
    for name, contestant in workload.contestants.items():
        prompts = workload.prompts(0)
        answers = stage.run(contestant, prompts, min(CHECKED_TOKENS, workload.output_len))["answers"]
        shortfalls = stage.judge(contestant, prompts, [row[:CHECKED_TOKENS] for row in answers])
        checked[name] = round(check(name, contestant, shortfalls), 2)
    figures: dict[str, list[float]] = {name: [] for name in workload.contestants}
    for round_ in range(1, rounds + 1):
        for name, contestant in workload.contestants.items():
            figures[name].append(measure(stage, workload, contestant, workload.prompts(round_)))
    return {
        "metric": workload.metric,
        "figures": {name: round(statistics.median(values), 1) for name, values in figures.items()},
        "rounds": {name: [round(value, 2) for value in values] for name, values in figures.items()},
        "load_s": {name: round(stage.load_s(entry), 1) for name, entry in workload.contestants.items()},
        "largest_shortfall": checked,
        "goals": [verdict(goal, figures) for goal in workload.goals],
    }  # fmt: skip


def print_table(name: str, report: dict[str, Any]) -> None:
    print(f"\n{name} ({report['metric']})")
    for contestant, figure in report["figures"].items():
        print(f"  {contestant:24} {figure:10.1f}   started in {report['load_s'][contestant]:.1f} s")
    for goal in report["goals"]:
        found = f"{goal['ratio']:.2f} x" if "ratio" in goal else f"{goal['more_ms']:+.2f} ms"
        wanted = f"at least {goal['at_least']} x" if "ratio" in goal else f"at most {goal['at_most']:+} ms"
        print(f"  {goal['who']} against {goal['than']}: {found} ({wanted}: {'holds' if goal['holds'] else 'NOT'})")
    sys.stdout.flush()


def draw(path: Path, reports: dict[str, Any]) -> None:
    """Speed, and the share of the base's that is left, against how many adapters the rows have."""
    speeds: Lines = {}
    for name, number in (("base", 0), ("1-adapter", 1), ("8-adapters", 8), ("32-adapters", 32)):
        for contestant, figure in reports.get(name, {"figures": {}})["figures"].items():
            speeds.setdefault(contestant, []).append((float(number), figure))
    shares = {
        name: [(number, speed / line[0][1]) for number, speed in line]
        for name, line in speeds.items()
        if line[0][0] == 0
    }
    x = "distinct adapters in 32 rows (0 = the base model)"
    write_charts(
        path, [("32 rows of 128 + 128 tokens", x, "tok/s", speeds), ("kept of the base's", x, "share", shares)]
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=lambda text: Path(text).resolve(), help="where prepare.sh put them")
    parser.add_argument("--model", type=lambda text: Path(text).resolve(), default=DEMO_MODEL.resolve())
    parser.add_argument("--only", default=",".join(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the whole report")
    parser.add_argument("--plot", type=Path, help="where to draw speed by number of adapters")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a `timeout` must not leave stopped engines behind
    reports: dict[str, Any] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shape = ModelConfig.from_dir(options.model).base_shape()
        most = max(WORKLOADS[name].num_adapters for name in options.only.split(","))
        adapters = [str(write_adapter(directory / str(i), shape, 16, i)) for i in range(most)]
        for name in options.only.split(","):
            workload = WORKLOADS[name]
            with Stage(workload, options.model, options.peers, adapters) as stage:
                reports[name] = run_workload(stage, workload, options.rounds)
            print_table(name, reports[name])
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1) + "\n")
    if options.plot:
        draw(options.plot, reports)
    return 0 if all(goal["holds"] for report in reports.values() for goal in report["goals"]) else 1


if __name__ == "__main__":
    sys.exit(main())
