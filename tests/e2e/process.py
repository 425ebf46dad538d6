"""ChorusProcess: `chorus serve` and its like as real processes, for tests. None is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

START_S = 120.0


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without any setting of Chorus; one thread per process keeps small models fast on few cores."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHORUS_")}
    return inherited | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | dict(extra or {})


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    found = [int(child) for child in _children(pid)]
    return found + [deeper for child in found for deeper in descendants(child)]


def _children(pid: int) -> list[str]:
    try:
        return [pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()]
    except OSError:
        return []


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.02)


class ChorusProcess:
    """`chorus ARGUMENTS` in a directory of its own; with `with`, everything it started is gone at the end."""

    def __init__(self, *arguments: str, data_dir: Path | None = None, **environ: str) -> None:
        self.data_dir = data_dir or Path(tempfile.mkdtemp(prefix="chorus-test-"))
        if data_dir is None:
            weakref.finalize(self, shutil.rmtree, self.data_dir, True)
        self._arguments = arguments
        self._environ = clean_environment({"CHORUS_DATA_DIR": str(self.data_dir), "CHORUS_PORT": "0"} | environ)
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", *self._arguments],
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in children:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        if error is not None:
            print(self.output)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def admin_key(self) -> str:
        return self._environ.get("CHORUS_ADMIN_KEY") or (self.data_dir / "admin.key").read_text().strip()

    @property
    def url(self) -> str:
        return self.find(r"ready: (http\S+)/v1")

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.output)
        assert found is not None, self.output
        return found[1]

    def wait_line(self, pattern: str, timeout_s: float = START_S) -> Self:
        """Until a line like this was printed; fails when the process ends before."""

        def is_there() -> bool:
            if re.search(pattern, self.output):
                return True
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            return False

        wait_for(is_there, timeout_s)
        return self

    def wait_ready(self) -> Self:
        return self.wait_line(r"ready: http")

    def wait_end(self, timeout_s: float = 60.0) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def children(self) -> dict[int, str]:
        """pid → command line of every process below."""
        return {pid: _command_line(pid) for pid in descendants(self.process.pid) if is_running(pid)}

    def pids(self, what: str) -> list[int]:
        """Of "redis", "engine" or "worker", those that were started again too, in the order of their start."""
        mark = "redis-server" if what == "redis" else f"gateway.child {what}"
        return [pid for pid, line in self.children().items() if mark in line]

    def admin(self, method: str, path: str, **content: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        return httpx.request(method, f"{self.url}/admin/v1/{path}", headers=headers, timeout=60, **content)  # type: ignore[arg-type]

    def make_key(self, tenant: str) -> str:
        """A key of the tenant, which is made if it is not there."""
        self.admin("POST", "tenants", json={"id": tenant})
        return str(self.admin("POST", f"tenants/{tenant}/keys", json={"name": "test"}).json()["key"])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
