"""DiskTier: KV blocks as files, one each, written and read by two threads. Knows no policy and no limit.

A file is named by its key, which holds everything that its content depends on (model, dtype, layout, adapter, salt,
tokens) and whose it is, none of it readable. Nothing is believed: size, key and checksum are tested before a byte is
used. Files are not synced, since what a crash leaves half written fails its checksum.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.block_pool import DIGEST_BYTES, OWNER_BYTES
from engine.config import ConfigError
from engine.kv_traffic import Transfer

log = logging.getLogger(__name__)

MAGIC = b"chorus-kv-block2"
KEY_BYTES = DIGEST_BYTES + OWNER_BYTES
HEAD_BYTES = len(MAGIC) + KEY_BYTES + 32
NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.kv")
NAME_OF_OLD = re.compile(r"[0-9a-f]{64}\.kv")
"""Without an owner: nobody can ask for it, nor have it erased."""
LOCK_FILE = "lock"

Job = tuple[str, bytes, int]


class DiskTier:
    """Files in `directory`/ab/abcd….kv, mode 0600. `memory(slot)` is the host memory of a slot.

    Raises ConfigError if the directory can't be used, or another engine uses it.
    """

    def __init__(self, directory: Path, payload_bytes: int, memory: Callable[[int], memoryview]) -> None:
        self.block_bytes = HEAD_BYTES + payload_bytes
        self._payload_bytes = payload_bytes
        self._directory = directory
        self._memory = memory
        self._lock = _lock(directory)
        self._done: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("kv-reads", self._reads), ("kv-writes", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def scan(self) -> list[tuple[bytes, int]]:
        """(key, bytes) of what is there, the least recently used first. Drafts of a former run are deleted, and blocks
        of former versions."""
        found = []
        for shelf in sorted(self._directory.iterdir()):
            if not (shelf.is_dir() and re.fullmatch("[0-9a-f]{2}", shelf.name)):
                continue
            for entry in os.scandir(shelf):
                if entry.name.endswith(".draft") or NAME_OF_OLD.fullmatch(entry.name):
                    os.unlink(entry)
                elif NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    found.append((state.st_mtime_ns, bytes.fromhex(entry.name[:-3]), state.st_size))
        return [(key, size) for _used, key, size in sorted(found)]

    def measure(self, num_blocks: int) -> float | None:
        """Bytes per second at which the disk itself gives blocks, and not the system's memory of them: some are
        written, forgotten there, and read. None where that fails. At start: nobody uses the slots yet."""
        keys = [os.urandom(KEY_BYTES) for _ in range(num_blocks)]
        try:
            for slot, key in enumerate(keys):
                self._write(key, slot)
                _leave_to_disk(self._path(key))
            started = time.perf_counter()
            for slot, key in enumerate(keys):
                self._read(key, slot)
            return num_blocks * self.block_bytes / (time.perf_counter() - started)
        except (OSError, ValueError) as error:
            log.warning("the speed of %s can't be measured: %s", self._directory, error)
            return None
        finally:
            with suppress(OSError):
                for key in keys:
                    self._remove(key, 0)

    def write(self, key: bytes, slot: int) -> None:
        self._writes.put(("write", key, slot))

    def read(self, key: bytes, slot: int) -> None:
        self._reads.put(("read", key, slot))

    def remove(self, key: bytes) -> None:
        self._writes.put(("remove", key, 0))

    def poll(self) -> list[Transfer]:
        """What has come to its end since the last time."""
        done = []
        with suppress(queue.Empty):
            while True:
                done.append(self._done.get_nowait())
        return done

    def close(self) -> None:
        """Finishes what was asked for and ends the threads."""
        for jobs in (self._reads, self._writes):
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._lock)

    def _run(self, jobs: queue.SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            kind, key, slot = job
            started = time.perf_counter()
            try:
                getattr(self, f"_{kind}")(key, slot)
                is_ok = True
            except (OSError, ValueError) as error:
                log.warning("KV block %s of the disk: %s failed: %s", key.hex()[:12], kind, error)
                is_ok = False
                if kind == "read":
                    self._writes.put(("remove", key, 0))
            if kind != "remove":
                self._done.put(Transfer(key, slot, kind == "read", is_ok, time.perf_counter() - started))

    def _write(self, key: bytes, slot: int) -> None:
        path = self._path(key)
        draft = path.with_suffix(".draft")
        payload = self._memory(slot)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            draft.unlink()
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(file, "wb", buffering=0) as stream:
                _write_all(stream.fileno(), [MAGIC, key, hashlib.sha256(payload).digest(), payload])
            os.replace(draft, path)
        except BaseException:
            with suppress(FileNotFoundError):
                draft.unlink()
            raise

    def _read(self, key: bytes, slot: int) -> None:
        """Raises ValueError for what is not, byte for byte, what was written."""
        with open(os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self.block_bytes:
                raise ValueError("its size is wrong")
            head = file.read(HEAD_BYTES)
            payload = self._memory(slot)
            view = payload
            while view and (count := file.readinto(view)):
                view = view[count:]
            os.utime(file.fileno())
        if view or head != MAGIC + key + hashlib.sha256(payload).digest():
            raise ValueError("its content is damaged")

    def _remove(self, key: bytes, slot: int) -> None:
        with suppress(FileNotFoundError):
            self._path(key).unlink()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._directory / name[:2] / f"{name}.kv"


def _leave_to_disk(path: Path) -> None:
    """What was written there is on the disk alone, where the system can be told so."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _lock(directory: Path) -> int:
    """An open file that no other engine can lock."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"--kv-disk-dir {directory}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"--kv-disk-dir {directory} is in use by another engine: give each its own") from None
    return lock


def _write_all(file: int, parts: list[bytes | memoryview]) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(file, view) :]
