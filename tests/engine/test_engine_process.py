"""What a process that has to answer in time does before it serves, for nothing else to stop it or take its cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
KEPT = """
import gc
from engine.garbage import settle

kept = [[number] for number in range(100_000)]
settle()
print(len(gc.get_objects()))
"""
CYCLES = """
import weakref
from engine.garbage import THRESHOLD, settle

class Node: ...

def cycle():
    one = Node()
    one.itself = one
    return weakref.ref(one)

before = cycle()
settle()
after = cycle()
many = [[] for _ in range(THRESHOLD + 1)]
print(sum(node() is not None for node in (before, after)))
"""
COLLECTOR = """
import gc, sys
from types import SimpleNamespace as Bag
import engine.server as server

def build_core(config):
    import torch
    return Bag(close=lambda: None), None

sys.modules["engine.build"] = Bag(build_core=build_core)
server.Link = lambda *_: Bag(close=lambda: None)
server.Server = lambda *_: Bag(run=lambda: print(gc.get_freeze_count()), stop=lambda: None)
server.run(None, "ipc:///nowhere")
"""
THREADS = """
import os, sys, time
from types import SimpleNamespace as Bag
import gateway.cli

def run():
    import torch
    torch.set_num_threads(2)
    values, rows = torch.randn(32, 576), torch.arange(32)
    values[rows]
    time.sleep(0.05)
    before = others()
    for _ in range(20):
        values[rows]
        time.sleep(0.02)
    print(others() - before)

def others():
    paths = (f"/proc/self/task/{task}/schedstat" for task in os.listdir("/proc/self/task") if int(task) != os.getpid())
    return sum(int(open(path).read().split()[0]) for path in paths)

sys.modules["gateway.cli.app"] = Bag(run=run)
gateway.cli.main()
"""


def printed(script: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True))


def test_what_was_loaded_is_not_looked_at_again() -> None:
    assert printed(KEPT) < 1000


def test_cycles_of_before_and_after_are_freed() -> None:
    assert printed(CYCLES) == 0


def test_an_engine_settles_before_it_serves() -> None:
    assert printed(COLLECTOR) > 10_000


def test_torch_threads_sleep_when_they_have_nothing_to_do() -> None:
    """They turn for milliseconds otherwise, while our own threads wait for the cores."""
    assert printed(THREADS) < 20 * 1_000_000
