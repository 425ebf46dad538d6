"""Child: restarted when it ends or hangs, given up when it never worked, gone when its parent is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway import processes
from gateway.processes import Child, ChildFailed, Command
from tests.waiting import until


def python(code: str, name: str = "child") -> Child:
    return Child(Command(name, [sys.executable, "-c", textwrap.dedent(code)]))


@contextlib.asynccontextmanager
async def running(child: Child) -> AsyncIterator[None]:
    task = asyncio.create_task(child.run())
    try:
        yield
    finally:
        await child.stop(5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(processes, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(processes, "MAX_MISSES", 5)


async def test_a_killed_child_is_started_again() -> None:
    """kill -9 of a child: another one takes its place."""
    child = python("import time; time.sleep(60)")
    child.has_worked = True
    async with running(child):
        await until(lambda: child.pid)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)

        await until(lambda: child.pid not in (None, first))

        assert child.num_starts == 2


async def test_a_silent_child_is_killed_and_replaced() -> None:
    """A child that was alive and then hangs is not waited for."""
    child = python("import time; time.sleep(60)")
    child.has_worked = True
    signs = iter([True] * 3)
    child.is_alive = lambda: next(signs, False)
    async with running(child):
        await until(lambda: child.num_starts == 2)


async def test_a_child_that_takes_long_to_start_is_not_killed() -> None:
    """Silence counts only after a first sign of life: loading a large model is no hang."""
    child = python("import time; time.sleep(60)")
    async with running(child):
        await asyncio.sleep(0.8)

        assert child.num_starts == 1
        assert child.pid


async def test_a_child_that_never_works_is_given_up() -> None:
    """A fault that is there from the start ends the parent with a reason, instead of looping for ever."""
    child = python("raise SystemExit(3)", "engine")

    with pytest.raises(ChildFailed, match="engine ended 5 times \\(exit status 3\\)"):
        await asyncio.wait_for(child.run(), 20)


async def test_refused_settings_are_not_tried_again() -> None:
    """A child that says that its settings can't work is believed at once."""
    child = python("raise SystemExit(78)")

    with pytest.raises(ChildFailed) as error:
        await asyncio.wait_for(child.run(), 20)

    assert error.value.status == 78
    assert child.num_starts == 1


async def test_stop_kills_what_ignores_it() -> None:
    """SIGTERM first; SIGKILL for a child that does not listen."""
    child = python("import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)")
    async with running(child):
        await until(lambda: child.pid)
        await asyncio.sleep(0.3)
        started_at = time.monotonic()

        await child.stop(0.3)

        assert time.monotonic() - started_at < 20
        assert child.pid is None


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    """kill -9 of the parent: the kernel ends the child, even one that ignores its stdin."""
    file = tmp_path / "pid"
    code = f"""
    import asyncio, sys
    from gateway.processes import Child, Command
    sleeper = "import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    asyncio.run(Child(Command("c", [sys.executable, "-c", sleeper])).run())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        deadline = time.monotonic() + 20
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        child = int(file.read_text())
    finally:
        parent.kill()
        parent.wait()

    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
