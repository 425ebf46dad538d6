"""DiskCache: adapters of a bucket on the local disk, within a number of bytes. Any number of processes may share one.

    root/<digest>/        MANIFEST and the files of an adapter, whole, and a checksum of its weights
    root/<digest>.part/   the same on its way: each file as far as it has come, so that a fetch goes on after a cut
                          connection, a kill or a restart

Whoever reads an entry, and whoever fetches one, has its directory locked (flock): the first shared, the second for
itself. What is locked is not evicted; of the rest, the least recently used goes first (its time is the directory's).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from adapters import checksum
from adapters.bucket import NUM_PARTS, PART_BYTES
from adapters.spec import AdapterError, AdapterInvalid, AdapterTooLarge
from adapters.stages import Stages
from adapters.storage import DAMAGED, WEIGHTS_FILE, StorageError, file_sha256, is_digest, missing

MANIFEST = "manifest.json"
PART_AGE_S = 86400.0
"""A fetch that nobody went on with for so long is removed."""
_SUFFIX = ".part"


class File(msgspec.Struct, frozen=True):
    """One file of an adapter in a bucket. `tag` is what the bucket said when it was put there."""

    size: int
    sha256: str
    tag: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """What there must be of an adapter, by file name."""

    files: Mapping[str, File]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Source(Protocol):
    """Where the files of one adapter are got from. Raises OSError for what is worth trying again."""

    @property
    def manifest(self) -> Manifest: ...
    def get(self, name: str, start: int, end: int) -> bytes: ...


class DiskCache:
    """root          a directory of its own, on the same file system as `stages`
    limit_bytes   of all entries, those on their way too
    """

    def __init__(self, root: Path, stages: Stages, limit_bytes: int) -> None:
        self._root = root
        self._stages = stages
        self._limit_bytes = limit_bytes
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def reading(self, digest: str) -> Iterator[Path | None]:
        """Its directory, which stays until the block is left; None if it isn't here. Raises AdapterMissing for what
        is no digest, as all of these."""
        path = self._entry(digest)
        with _locked(path, fcntl.LOCK_SH) as is_there:
            if is_there:
                _touch(path)
            yield path if is_there else None

    def fetch(self, digest: str, source: Source) -> None:
        """Gets it here, or waits for another who does; what is here already is kept.

        Raises AdapterInvalid when what comes is not what it should be, twice; AdapterTooLarge; OSError."""
        target = self._entry(digest)
        part = target.with_suffix(_SUFFIX)
        part.mkdir(mode=0o700, exist_ok=True)
        with _locked(part, fcntl.LOCK_EX) as is_there:
            if not is_there:  # another has finished it meanwhile
                return
            if target.is_dir():
                shutil.rmtree(part)
                return
            try:
                manifest = source.manifest
                self._reserve(part, manifest)
                for name, file in manifest.files.items():
                    _get(source, name, file, part / name)
                _sum(part, manifest)
            except AdapterError:
                shutil.rmtree(part)
                raise
            part.rename(target)
            _touch(target)

    def adopt(self, digest: str, directory: Path, manifest: Manifest) -> bool:
        """Takes over a directory with these files, if there is room and it isn't here already."""
        try:
            self._reserve(directory, manifest)
            _sum(directory, manifest)
            directory.rename(self._entry(digest))
        except (OSError, AdapterTooLarge):
            return False
        return True

    def drop(self, digest: str) -> bool:
        """Throws it away, unless it is being read."""
        return self._evict(self._entry(digest))

    def sweep(self) -> None:
        """Removes what was begun long ago and never finished."""
        for part in self._root.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                if time.time() - max(file.stat().st_mtime for file in (part, *part.iterdir())) > PART_AGE_S:
                    self._evict(part)

    def _entry(self, digest: str) -> Path:
        if not is_digest(digest):
            raise missing()
        return self._root / digest

    def _reserve(self, directory: Path, manifest: Manifest) -> None:
        """Makes room for what the manifest says and writes it into `directory`, so that it counts from now on."""
        if manifest.size > self._limit_bytes:
            raise AdapterTooLarge(
                "adapter_too_large",
                f"its {manifest.size} bytes are more than the adapter cache of {self._limit_bytes} bytes may hold",
            )
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._make_room(manifest.size, directory)
            (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        finally:
            os.close(lock)

    def _make_room(self, size: int, newcomer: Path) -> None:
        entries = [path for path in self._root.iterdir() if path.is_dir() and path != newcomer]
        sizes = {path: _size(path) for path in entries}
        used = sum(sizes.values())
        for path in sorted(entries, key=_used_at):
            if used + size <= self._limit_bytes:
                return
            if self._evict(path):
                used -= sizes[path]
        if used + size > self._limit_bytes:
            raise StorageError("the adapter cache is full of adapters that are being read or fetched")

    def _evict(self, path: Path) -> bool:
        """False: somebody reads or fetches it."""
        with _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_there:
            if is_there:
                self._stages.doom(path)
        if is_there:
            self._stages.sweep()
        return is_there


@contextmanager
def _locked(path: Path, how: int) -> Iterator[bool]:
    """False: there is no such directory (any more), or with LOCK_NB, somebody else has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(descriptor, how) and _is_same(descriptor, path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    """It may have been moved away while we waited for the lock."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _size(entry: Path) -> int:
    try:
        return msgspec.json.decode((entry / MANIFEST).read_bytes(), type=Manifest).size
    except (OSError, msgspec.DecodeError):  # just begun, just gone, or half written at a power cut
        with suppress(OSError):
            return sum(file.stat().st_size for file in entry.iterdir())
        return 0


def _touch(entry: Path) -> None:
    now = time.time_ns()  # finer than the clock of the file system
    os.utime(entry, ns=(now, now))


def _used_at(entry: Path) -> float:
    with suppress(FileNotFoundError):
        return entry.stat().st_mtime
    return 0.0


def _get(source: Source, name: str, file: File, path: Path) -> None:
    """From where it stood to the end; once more from the start if it isn't what it should be."""
    for _ in range(2):
        _append(source, name, file.size, path)
        if file_sha256(path).hex() == file.sha256:
            return
        path.unlink()
    raise AdapterInvalid("adapter_damaged", DAMAGED, name)


def _sum(directory: Path, manifest: Manifest) -> None:
    """Its weights are what they should be: from now on, a checksum will tell. Where a manifest has none, whoever loads
    the adapter says so."""
    if WEIGHTS_FILE in manifest.files:
        checksum.write(directory / WEIGHTS_FILE, bytes.fromhex(manifest.files[WEIGHTS_FILE].sha256))


def _append(source: Source, name: str, size: int, path: Path) -> None:
    """Some ranges at a time, written in their order: what the file holds is always its beginning."""
    with path.open("ab") as target, ThreadPoolExecutor(NUM_PARTS, "adapter-range") as threads:
        if target.tell() > size:
            target.truncate(0)
        while (done := target.tell()) < size:
            ends = [min(size, done + (number + 1) * PART_BYTES) for number in range(NUM_PARTS)]
            ranges = sorted({(start, end) for start, end in zip([done, *ends], ends, strict=False) if start < end})
            for data in threads.map(lambda place: source.get(name, *place), ranges):
                target.write(data)
                target.flush()
