"""Stages: private local directories of uploads under way. Each is locked (flock) by the process that fills it, so that
the kernel tells whose maker is dead. Knows no digests."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

STAGE_AGE_S = 60.0
"""A stage younger than this is left alone by sweep(): its maker may not have locked it yet."""


class Stages:
    """The directories of `root`, which any number of processes may share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[Path, int] = {}
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make(self) -> Path:
        path = self.root / secrets.token_hex(16)
        path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._held[path] = descriptor
        return path

    def release(self, path: Path) -> None:
        """It is no stage of ours any more: it was moved away, or is gone."""
        descriptor = self._held.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        self.release(path)

    def doom(self, path: Path) -> None:
        """Moves any directory of the same file system here, at once, for sweep() to remove."""
        path.rename(self.root / f"gone-{secrets.token_hex(16)}")

    def sweep(self) -> int:
        """Removes what dead processes and doom() left. Returns how many directories."""
        return sum(self._sweep(path) for path in self.root.iterdir() if path not in self._held)

    def _sweep(self, path: Path) -> bool:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not path.name.startswith("gone-") and time.time() - path.stat().st_mtime < STAGE_AGE_S:
                return False
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                return True
            except BlockingIOError:
                return False
            finally:
                os.close(descriptor)
        return False
