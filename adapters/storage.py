"""AdapterStore: where adapters lie, by digest. Knows no names, tenants or tensors.

DirectoryStore                a local directory, which any number of processes may share
bucket_store.BucketStore      an S3 bucket, with a cache on the local disk

    root/stage/<random>/   uploads under way (adapters/stages.py)
    root/store/<digest>/   CONFIG_FILE (its canonical spelling), WEIGHTS_FILE and COMPANION_FILES, and a checksum of the
                           weights; never changes
    root/locks/<2 digits>  locks by digest, shared by all processes; made once, never removed

Only a rename makes an entry of store/, after everything in it was synced: a crash leaves a stage, which sweep() finds
because nobody holds its lock any more. Deleting renames first, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from adapters import checksum
from adapters.config import MAX_CONFIG_BYTES, canonical
from adapters.header import open_regular
from adapters.spec import AdapterError, AdapterInvalid, AdapterMissing
from adapters.stages import Stages

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
COMPANION_FILES = ("chat_template.jinja", "defaults.json", "generation_config.json", "new_tokens.json")
"""What an adapter may bring along: part of it and of its digest, where it is there."""
MAX_COMPANION_BYTES = 64 << 10

DAMAGED = "the stored files are no longer what was uploaded"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class StorageError(OSError):
    """The storage does not answer, or refuses: worth trying again."""


class AdapterStore(Protocol):
    """A few methods between us and the disk or bucket. What is committed never changes. All may raise OSError.

    stage()               a fresh private directory to write CONFIG_FILE, WEIGHTS_FILE and COMPANION_FILES into
    discard(stage)        gives it up; after commit() it does nothing
    commit(stage)         → digest (content_digest); atomic: either it is there as a whole, or nothing happened.
                          Committing equal content again only begins its grace anew, and mends what was damaged
    reading(digest)       the directory that holds its files (read only), which stay until the block is left; they may
                          have to be fetched first. AdapterMissing if there are none
    outline(digest)       the same, but only the header of the weights need be there (the file has its true size)
    read(digest, name)    one of its small files; None if it has none of this name
    renew(digest)         what reading() gives is damaged: True if it will get it anew from elsewhere
    problem(digest)       why what is stored is not what was committed; None if it is
    delete(digest, …)     gone, or was never there; False if it was committed (again) less than `grace_s` ago
    digests()             everything that is stored
    sweep()               removes what dead processes left; how many directories
    """

    def stage(self) -> Path: ...
    def discard(self, stage: Path) -> None: ...
    def commit(self, stage: Path) -> str: ...
    def reading(self, digest: str) -> AbstractContextManager[Path]: ...
    def outline(self, digest: str) -> AbstractContextManager[Path]: ...
    def read(self, digest: str, name: str) -> bytes | None: ...
    def renew(self, digest: str) -> bool: ...
    def problem(self, digest: str) -> str | None: ...
    def delete(self, digest: str, grace_s: float = 0.0) -> bool: ...
    def digests(self) -> list[str]: ...
    def sweep(self) -> int: ...


@dataclass(frozen=True)
class Contents:
    """An adapter's digest, and the sha256 of each of its files."""

    digest: str
    files: dict[str, str]


def content_digest(directory: Path, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """sha256(canonical config ‖ sha256(weights) ‖ name, NUL and sha256 of each companion) of the files in `directory`,
    as hex; `others` are companions that lie elsewhere, name → sha256. Raises AdapterInvalid."""
    return _contents(_canonical_config(directory), directory, others).digest


def has_contents(directory: Path, digest: str) -> bool:
    """Whether the stored files are what was committed as `digest`; quick where the weights have a checksum. Raises
    AdapterInvalid."""
    config = _canonical_config(directory)
    known = checksum.known_sha256(directory / WEIGHTS_FILE)
    if known is not None and _contents(config, directory, weights=known).digest == digest:
        return True
    return _contents(config, directory).digest == digest


def seal(stage: Path) -> Contents:
    """Writes the config in its canonical spelling and looks at all that is there. Raises AdapterInvalid when a file is
    missing, or one too many, or the config isn't JSON."""
    config = _canonical_config(stage)
    for stray in stage.iterdir():
        if stray.name not in (CONFIG_FILE, WEIGHTS_FILE, *COMPANION_FILES):
            raise AdapterInvalid("file_invalid", "only the files of an adapter may be stored", stray.name)
    found = _contents(config, stage)
    (stage / CONFIG_FILE).write_bytes(config)
    return found


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def missing() -> AdapterMissing:
    return AdapterMissing("adapter_missing", "the store does not have this adapter")


class DirectoryStore:
    """An AdapterStore in a local directory, which any number of processes may share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stages = Stages(root / "stage")
        self._store = root / "store"
        self._locks = root / "locks"
        self._sound: dict[str, tuple[tuple[int, int, int], ...]] = {}
        for directory in (self._store, self._locks):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def stage(self) -> Path:
        return self._stages.make()

    def discard(self, stage: Path) -> None:
        self._stages.remove(stage)

    def commit(self, stage: Path) -> str:
        """Raises AdapterInvalid (see seal); the stage is then still there."""
        found = seal(stage)
        checksum.write(stage / WEIGHTS_FILE, bytes.fromhex(found.files[WEIGHTS_FILE]))
        for name in (*found.files, checksum.CHECKSUM_FILE):
            _sync(stage / name)
            (stage / name).chmod(0o444)
        _sync(stage)
        target = self._store / found.digest
        with self._lock(found.digest):
            if target.is_dir() and self.problem(found.digest) is not None:
                self._stages.doom(target)
            if target.is_dir():
                os.utime(target)  # its grace begins anew: a row that refers to it is about to be written
                shutil.rmtree(stage)
            else:
                stage.rename(target)
                os.utime(target)
                _sync(self._store)
        self._stages.release(stage)
        return found.digest

    def path(self, digest: str) -> Path:
        """The directory that holds its files (read only). Raises AdapterMissing."""
        path = self._store / digest
        if not is_digest(digest) or not path.is_dir():
            raise missing()
        return path

    @contextmanager
    def reading(self, digest: str) -> Iterator[Path]:
        yield self.path(digest)

    outline = reading

    def read(self, digest: str, name: str) -> bytes | None:
        try:
            return (self.path(digest) / name).read_bytes()
        except FileNotFoundError:
            return None

    def renew(self, digest: str) -> bool:
        return False

    def delete(self, digest: str, grace_s: float = 0.0) -> bool:
        if not is_digest(digest):
            return True
        path = self._store / digest
        with self._lock(digest), suppress(FileNotFoundError):
            if grace_s > 0 and time.time() - path.stat().st_mtime < grace_s:
                return False
            self._sound.pop(digest, None)
            self._stages.doom(path)
            _sync(self._store)
        self.sweep()
        return True

    def problem(self, digest: str) -> str | None:
        """Hashes once, and again when the files changed."""
        try:
            directory = self.path(digest)
            files = [file.stat() for file in sorted(directory.iterdir())]
            seen = tuple((file.st_mtime_ns, file.st_ctime_ns, file.st_size) for file in files)
            if self._sound.get(digest) != seen:
                if content_digest(directory) != digest:
                    return DAMAGED
                self._sound[digest] = seen
        except AdapterError as error:
            return error.message
        except OSError as error:
            return f"the stored files can't be read: {error.strerror}"
        return None

    def digests(self) -> list[str]:
        return sorted(entry.name for entry in self._store.iterdir() if is_digest(entry.name))

    def sweep(self) -> int:
        return self._stages.sweep()

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


def _contents(
    config: bytes, directory: Path, others: Mapping[str, str] = MappingProxyType({}), weights: bytes | None = None
) -> Contents:
    """weights: their sha256, if it is known."""
    weights = weights or file_sha256(directory / WEIGHTS_FILE)
    whole = hashlib.sha256(config + weights)
    files = {CONFIG_FILE: hashlib.sha256(config).hexdigest(), WEIGHTS_FILE: weights.hex()}
    for name in COMPANION_FILES:
        if name in others or os.path.lexists(directory / name):
            companion = bytes.fromhex(others[name]) if name in others else file_sha256(directory / name)
            whole.update(name.encode() + b"\0" + companion)
            files[name] = companion.hex()
    return Contents(whole.hexdigest(), files)


def file_sha256(path: Path) -> bytes:
    """Raises AdapterInvalid when there is no such file, or it is no plain one."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
