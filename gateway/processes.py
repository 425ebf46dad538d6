"""Child: one process that is started again whenever it ends or falls silent, and that never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.child import EX_CONFIG

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0
STEADY_S = 60.0
"""A child that ran so long was well: the next pause is the first one again."""
MAX_EARLY_FAILURES = 5
"""So many ends in a row before anything ever worked: starting it again is no use."""
CHECK_EVERY_S = 1.0
MAX_MISSES = 30
"""A child that has shown life once and then none at so many checks in a row is killed."""
PR_SET_PDEATHSIG = 1


class ChildFailed(Exception):
    """A child can't be kept running. `status` is the exit status that the parent should end with."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def die_with_parent() -> Callable[[], None] | None:
    """For preexec_fn: the kernel kills the child when its parent dies, however it dies. None where it can't: there the
    child watches its stdin instead. SIGKILL is safe for Redis too: every write is in the kernel before it is answered.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def set_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return set_signal


@dataclass(frozen=True)
class Command:
    """What to start. `job` is the line that it gets on stdin."""

    name: str
    argv: Sequence[str]
    job: str = ""
    pass_fds: tuple[int, ...] = ()


class Child:
    """One supervised process. `is_alive()` is asked every second; once it said yes, a long row of no is a hang."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.is_alive: Callable[[], bool] = lambda: False
        self.has_worked = False  # set by the supervisor once everything answered
        self.num_starts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Keeps it running until stop(). Raises ChildFailed."""
        pause_s, failures = FIRST_PAUSE_S, 0
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            started_at = loop.time()
            status = await self._run_once()
            if self._is_stopping:
                return
            if status == EX_CONFIG:
                raise ChildFailed(f"{self.name} refused its settings", EX_CONFIG)
            failures += 1
            if not self.has_worked and failures >= MAX_EARLY_FAILURES:
                raise ChildFailed(f"{self.name} ended {failures} times ({_describe(status)}) before it ever worked")
            if loop.time() - started_at > STEADY_S:
                pause_s = FIRST_PAUSE_S
            log.warning("%s ended (%s); starting it again in %g s", self.name, _describe(status), pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL if it has not ended by then."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
                return
        log.warning("%s did not end within %g s; killing it", self.name, grace_s)
        self.signal(signal.SIGKILL)
        await process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run_once(self) -> int:
        self.num_starts += 1
        process = self._process = await asyncio.create_subprocess_exec(
            *self.command.argv,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=self.command.pass_fds,
            preexec_fn=die_with_parent(),
            start_new_session=True,  # Ctrl-C is for the supervisor alone: it stops the others in order
        )
        if self._is_stopping:
            self.signal(signal.SIGTERM)
        assert process.stdin is not None
        try:
            if self.command.job:
                process.stdin.write(self.command.job.encode() + b"\n")
            return await self._watch(process)
        finally:
            if process.returncode is None:
                self.signal(signal.SIGKILL)
                await process.wait()
            process.stdin.close()

    async def _watch(self, process: asyncio.subprocess.Process) -> int:
        """Its exit status. Misses are counted rather than timed, so that a suspended machine is no silence."""
        was_alive, misses = False, 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    return await process.wait()
            is_alive = self.is_alive()
            was_alive |= is_alive
            misses = 0 if is_alive else misses + 1
            if was_alive and misses >= MAX_MISSES and not self._is_stopping:
                log.error("%s shows no sign of life; killing it", self.name)
                self.signal(signal.SIGKILL)


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
