"""AdapterStore: where adapters lie, by digest. Knows no names, tenants or tensors.

    root/stage/<random>/   private directories of uploads under way, each locked (flock) by the process that fills it
    root/store/<digest>/   CONFIG_FILE (its canonical spelling) and WEIGHTS_FILE; never changes
    root/locks/<2 digits>  locks by digest, shared by all processes; made once, never removed

Only a rename makes an entry of store/, after everything in it was synced: a crash leaves a stage, which sweep() finds
because nobody holds its lock any more. Deleting renames first, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from adapters.config import MAX_CONFIG_BYTES, canonical
from adapters.header import open_regular
from adapters.spec import AdapterError, AdapterInvalid, AdapterMissing

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_STAGE_AGE_S = 60.0
"""A stage younger than this is left alone by sweep(): its maker may not have locked it yet."""


class AdapterStore(Protocol):
    """A few methods between us and the disk or bucket. What is committed never changes.

    stage()               a fresh private directory to write CONFIG_FILE and WEIGHTS_FILE into
    discard(stage)        gives it up; after commit() it does nothing
    commit(stage)         → digest; atomic: either store/<digest>/ is whole, or nothing happened. The digest is
                          sha256(canonical config ‖ sha256(weights)); committing equal content again is a no-op
    path(digest)          the directory that holds its files (read only); AdapterMissing if there is none
    problem(digest)       why what is stored is not what was committed; None if it is
    delete(digest, …)     gone, or was never there; False if it was committed (again) less than `grace_s` ago
    """

    def stage(self) -> Path: ...
    def discard(self, stage: Path) -> None: ...
    def commit(self, stage: Path) -> str: ...
    def path(self, digest: str) -> Path: ...
    def problem(self, digest: str) -> str | None: ...
    def delete(self, digest: str, grace_s: float = 0.0) -> bool: ...


def content_digest(directory: Path) -> str:
    """sha256(canonical config ‖ sha256(weights)) of the files in `directory`, as hex. Raises AdapterInvalid."""
    return _digest(_canonical_config(directory), directory)


class DirectoryStore:
    """An AdapterStore in a local directory, which any number of processes may share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stages = root / "stage"
        self._store = root / "store"
        self._locks = root / "locks"
        self._held: dict[Path, int] = {}
        self._sound: dict[str, tuple[tuple[int, int, int], ...]] = {}
        for directory in (self._stages, self._store, self._locks):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def stage(self) -> Path:
        path = self._stages / secrets.token_hex(16)
        path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._held[path] = descriptor
        return path

    def discard(self, stage: Path) -> None:
        shutil.rmtree(stage, ignore_errors=True)
        self._release(stage)

    def commit(self, stage: Path) -> str:
        """Raises AdapterInvalid when a file is missing or the config isn't JSON; the stage is then still there."""
        config = _canonical_config(stage)
        digest = _digest(config, stage)
        for stray in stage.iterdir():
            if stray.name not in (CONFIG_FILE, WEIGHTS_FILE):
                raise AdapterInvalid("file_invalid", "only the two adapter files may be stored", stray.name)
        (stage / CONFIG_FILE).write_bytes(config)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            _sync(stage / name)
            (stage / name).chmod(0o444)
        _sync(stage)
        target = self._store / digest
        with self._lock(digest):
            if target.is_dir():
                os.utime(target)  # its grace begins anew: a row that refers to it is about to be written
                shutil.rmtree(stage)
            else:
                stage.rename(target)
                os.utime(target)
                _sync(self._store)
        self._release(stage)
        return digest

    def path(self, digest: str) -> Path:
        path = self._store / digest
        if not _DIGEST.fullmatch(digest) or not path.is_dir():
            raise AdapterMissing("adapter_missing", "the store does not have this adapter")
        return path

    def delete(self, digest: str, grace_s: float = 0.0) -> bool:
        if not _DIGEST.fullmatch(digest):
            return True
        path = self._store / digest
        with self._lock(digest), suppress(FileNotFoundError):
            if grace_s > 0 and time.time() - path.stat().st_mtime < grace_s:
                return False
            self._sound.pop(digest, None)
            path.rename(self._stages / f"gone-{secrets.token_hex(16)}")
            _sync(self._store)
        self.sweep()
        return True

    def problem(self, digest: str) -> str | None:
        """Hashes once, and again when the files changed."""
        try:
            directory = self.path(digest)
            files = [(directory / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
            seen = tuple((file.st_mtime_ns, file.st_ctime_ns, file.st_size) for file in files)
            if self._sound.get(digest) != seen:
                if content_digest(directory) != digest:
                    return "the stored files are no longer what was uploaded"
                self._sound[digest] = seen
        except AdapterError as error:
            return error.message
        except OSError as error:
            return f"the stored files can't be read: {error.strerror}"
        return None

    def digests(self) -> list[str]:
        """Everything that is stored."""
        return sorted(entry.name for entry in self._store.iterdir() if _DIGEST.fullmatch(entry.name))

    def sweep(self) -> int:
        """Removes what dead processes and deletions left in stage/. Returns how many directories."""
        return sum(self._sweep(path) for path in self._stages.iterdir() if path not in self._held)

    def _sweep(self, path: Path) -> bool:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not path.name.startswith("gone-") and time.time() - path.stat().st_mtime < _STAGE_AGE_S:
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

    def _release(self, stage: Path) -> None:
        descriptor = self._held.pop(stage, None)
        if descriptor is not None:
            os.close(descriptor)

    @contextmanager
    def _lock(self, digest: str) -> Iterator[None]:
        """Excludes every other process (and thread) from changing this digest. Covers a 256th of all digests."""
        descriptor = os.open(self._locks / digest[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _canonical_config(directory: Path) -> bytes:
    with open_regular(directory / CONFIG_FILE) as file:
        return canonical(file.read(MAX_CONFIG_BYTES + 1))


def _digest(config: bytes, directory: Path) -> str:
    with open_regular(directory / WEIGHTS_FILE) as file:
        weights = hashlib.file_digest(file, "sha256")
    return hashlib.sha256(config + weights.digest()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
