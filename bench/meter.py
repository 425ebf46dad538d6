"""What processes cost: CPU time and memory, from /proc. On a busy machine it is the one figure that can be compared:
requests per second of a machine are at most its cores over the CPU time of one request."""

from __future__ import annotations

import os
import time
from pathlib import Path

NUM_CORES = len(os.sched_getaffinity(0))


class Meter:
    """CPU time of named parts, each some processes; "client" is this process."""

    def __init__(self, **parts: list[int]) -> None:
        self._parts = parts
        self._last: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._last = self._read()

    def per(self, count: int) -> dict[str, float]:
        """Milliseconds since start(), of each part, for one of `count`; and the `sum`."""
        now = self._read()
        found = {name: (now[name] - then) * 1000 / max(1, count) for name, then in self._last.items()}
        return {name: round(value, 4) for name, value in (*found.items(), ("sum", sum(found.values())))}

    def _read(self) -> dict[str, float]:
        return {"client": time.process_time()} | {name: sum(map(_cpu_s, pids)) for name, pids in self._parts.items()}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pids: list[int]) -> list[float]:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return [round(count * os.sysconf("SC_PAGE_SIZE") / 2**20, 1) for count in pages]


def peak_mb(pid: int) -> float:
    """The largest it ever had; 0 once it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max((round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith("VmHWM")), default=0.0)


def descendants(pid: int) -> list[int]:
    """The process and all that it started."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(found for child in children for found in descendants(child))]
