"""The collector of cycles leaves alone what lives as long as the process, in a process that has to answer in time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(code: str) -> None:
    """In a process of its own: the collector is the whole process's."""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_what_was_loaded_is_not_looked_at_again() -> None:
    run(
        "import gc; from engine.garbage import settle\n"
        "kept = [[number] for number in range(100_000)]\n"
        "settle()\n"
        "assert gc.get_freeze_count() > 100_000 and len(gc.get_objects()) < 1000"
    )


def test_cycles_of_before_and_after_are_freed() -> None:
    run(
        "import gc, weakref; from engine.garbage import THRESHOLD, settle\n"
        "class Node: pass\n"
        "def cycle():\n"
        "    one = Node(); one.self = one\n"
        "    return weakref.ref(one)\n"
        "before = cycle(); settle(); assert before() is None\n"
        "after = cycle()\n"
        "many = [[] for _ in range(THRESHOLD + 1)]\n"
        "assert after() is None"
    )
