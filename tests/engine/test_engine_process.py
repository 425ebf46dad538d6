"""What an engine's own process does before it serves, for nothing else to stop it or take its cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SERVE = """
import gc, os, time
from types import SimpleNamespace as Bag
import engine.server as server

def build_core(config):
    import torch
    return Bag(close=lambda: None), None

def serve():
    {serve}

import sys
sys.modules["engine.build"] = Bag(build_core=build_core)
server.Link = lambda *_: Bag(close=lambda: None)
server.Server = lambda *_: Bag(run=serve, stop=lambda: None)
server.run(None, "ipc:///nowhere")
"""


def serve(code: str) -> str:
    """What `code` prints where the engine would serve, without a model and without a socket."""
    script = SERVE.format(serve=code.strip().replace("\n", "\n    "))
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_collector_leaves_what_was_loaded_alone() -> None:
    assert int(serve("print(gc.get_freeze_count())")) > 10_000


def test_torch_threads_sleep_when_they_have_nothing_to_do() -> None:
    """They turn for milliseconds otherwise, while our own threads wait for the cores."""
    used = serve("""
import torch
torch.set_num_threads(2)
def others():
    paths = (f"/proc/self/task/{task}/schedstat" for task in os.listdir("/proc/self/task") if int(task) != os.getpid())
    return sum(int(open(path).read().split()[0]) for path in paths)
values, rows = torch.randn(32, 576), torch.arange(32)
values[rows]
time.sleep(0.05)
before = others()
for _ in range(20):
    values[rows]
    time.sleep(0.02)
print(others() - before)
""")

    assert int(used) < 20 * 1_000_000
