"""Sources: places with adapters of their own, which Chorus looks at again and again. Knows no registry and no policy.

    <root>/<tenant>/<name>/    the files of one adapter as PEFT saves them; whatever else lies there is not looked at

DirectorySource   a local directory; links are never followed
BucketSource      a prefix of an S3-compatible bucket
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit

from adapters.bucket import PART_BYTES, Bucket, BucketConfig
from adapters.config import MAX_CONFIG_BYTES
from adapters.egress import Egress, Place, place_of
from adapters.new_tokens import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, TOKENS_FILE
from adapters.shards import INDEX_FILE, MAX_INDEX_BYTES, MAX_SHARDS, stage_file
from adapters.spec import AdapterInvalid, AdapterTooLarge
from adapters.storage import COMPANION_FILES, CONFIG_FILE, MAX_COMPANION_BYTES, WEIGHTS_FILE, StorageError

MAX_FOUND = 10_000
"""Adapters of one source."""
MAX_OBJECTS = 20 * MAX_FOUND
"""Of a bucket, adapters' or not."""
MAX_TENANT = 64
MAX_NAME = 200
"""Longer directories can be no tenant and no adapter's name: they are not looked at."""
AMAZON = "https://amazonaws.com"
ROLE_SERVERS = ("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::23")
"""Of EC2, ECS and EKS, by Amazon's own documents."""
_SMALL = {
    CONFIG_FILE: MAX_CONFIG_BYTES, INDEX_FILE: MAX_INDEX_BYTES, TOKENIZER_FILE: MAX_TOKENIZER_BYTES,
    **{name: MAX_COMPANION_BYTES for name in COMPANION_FILES if name != TOKENS_FILE},
}  # fmt: skip
"""Files that are not weights, and how large each may be."""


class SourceError(OSError):
    """The source as a whole can't be read."""


@dataclass(frozen=True)
class SourceFile:
    """`tag` changes when the content does."""

    name: str
    size: int
    tag: str


@dataclass(frozen=True)
class Found:
    """An adapter as it lies in a source at this moment."""

    tenant: str
    name: str
    files: tuple[SourceFile, ...]

    @property
    def mark(self) -> str:
        """The same as long as nothing of it changes."""
        return sha256(repr([(file.name, file.size, file.tag) for file in self.files]).encode()).hexdigest()


class AdapterSource(Protocol):
    """scan()               everything that is there, by tenant and name. Raises SourceError, OSError
    copy(found, stage, …)   its files into a stage, under the stage's own names. Raises AdapterInvalid, AdapterTooLarge;
                            OSError when it has changed meanwhile
    """

    def scan(self) -> list[Found]: ...
    def copy(self, found: Found, stage: Path, max_bytes: int) -> None: ...


class DirectorySource:
    """A local directory. No link in it is followed, neither of directories nor of files."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def scan(self) -> list[Found]:
        found = []
        for tenant in _subdirectories(self._root, MAX_TENANT):
            for name in _subdirectories(self._root / tenant, MAX_NAME):
                with os.scandir(self._root / tenant / name) as entries:
                    files = [_source_file(entry) for entry in entries if _is_wanted(entry.name) and _is_plain(entry)]
                found.append(Found(tenant, name, tuple(sorted(files, key=lambda file: file.name))))
        return _bounded(found)

    def copy(self, found: Found, stage: Path, max_bytes: int) -> None:
        targets = _plan(found, max_bytes)
        with _opened(self._root, found.tenant, found.name) as directory:
            for file, target in targets:
                descriptor = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
                with open(descriptor, "rb") as source, (stage / target).open("xb") as copied:
                    _copy(file, source, copied)


class BucketSource:
    """Objects named <tenant>/<name>/<file> below a prefix. `home` is where its server is, if that may have a private
    address; whatever else it sends us to may not."""

    def __init__(self, config: BucketConfig, home: Place | None) -> None:
        self._config = config
        self._home = home

    def scan(self) -> list[Found]:
        grouped: defaultdict[tuple[str, str], list[SourceFile]] = defaultdict(list)
        with self._opened() as bucket:
            listed = bucket.list(limit=MAX_OBJECTS)
        for one in listed:
            parts = one.key.split("/")
            if len(parts) == 3 and _can_be(parts[0], MAX_TENANT) and _can_be(parts[1], MAX_NAME):
                of_adapter = grouped[parts[0], parts[1]]
                if _is_wanted(parts[2]):
                    of_adapter.append(SourceFile(parts[2], one.size, one.tag))
        return _bounded([Found(*key, tuple(files)) for key, files in grouped.items()])

    def copy(self, found: Found, stage: Path, max_bytes: int) -> None:
        plan = _plan(found, max_bytes)
        with self._opened() as bucket:
            for file, target in plan:
                with (stage / target).open("xb") as copied:
                    for start in range(0, file.size, PART_BYTES):
                        end = min(file.size, start + PART_BYTES)
                        copied.write(bucket.get_range(f"{found.tenant}/{found.name}/{file.name}", start, end))

    @contextmanager
    def _opened(self) -> Iterator[Bucket]:
        egress = Egress(self._home)
        with egress as proxy:
            try:
                yield Bucket(replace(self._config, http={"proxy_url": proxy} | _roles(self._config)))
            except OSError as error:
                if egress.refused is None:
                    raise
                raise SourceError(egress.refused) from error


def open_source(place: str, options: Mapping[str, str], allow_private: bool) -> AdapterSource:
    """A directory, or s3://bucket/prefix with the options of a BucketConfig. Raises SourceError."""
    if "://" not in place:
        return DirectorySource(Path(place).expanduser().absolute())
    config = BucketConfig(place, options)
    try:
        home = place_of(config.endpoint or AMAZON)
    except ValueError as error:
        raise SourceError(f"{config.endpoint} is no address of a server") from error
    return BucketSource(config, home if allow_private else None)


def _roles(config: BucketConfig) -> dict[str, str]:
    """Where the client may go for the credentials of a machine, task or pod, beside its proxy. They are asked over
    http; the bucket's own requests are not, so that no redirect of theirs gets an answer there."""
    if config.endpoint.startswith("http:") or "AWS_ACCESS_KEY_ID" in config.options:
        return {}
    own = urlsplit(config.options.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")).hostname
    return {"proxy_excludes": ",".join((*ROLE_SERVERS, *([own] if own else ())))}


def _copy(file: SourceFile, source: BinaryIO, target: BinaryIO) -> None:
    _check_same(file, source)
    shutil.copyfileobj(source, target, PART_BYTES)
    _check_same(file, source)


def _check_same(file: SourceFile, source: BinaryIO) -> None:
    now = os.fstat(source.fileno())
    if not stat.S_ISREG(now.st_mode) or (now.st_size, _tag(now)) != (file.size, file.tag):
        raise StorageError(f"{file.name} changes at present")


def _is_wanted(name: str) -> bool:
    return name in _SMALL or name.endswith(".safetensors")


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


def _source_file(entry: os.DirEntry[str]) -> SourceFile:
    found = entry.stat(follow_symlinks=False)
    return SourceFile(entry.name, found.st_size, _tag(found))


def _tag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}-{found.st_ino}"


def _subdirectories(directory: Path, longest: int) -> list[str]:
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [name for name in names if _can_be(name, longest)]


def _can_be(name: str, longest: int) -> bool:
    """It can be a tenant's or an adapter's; what is hidden, or being copied by rsync and its like, is not."""
    return len(name) <= longest and name.isprintable() and not name.startswith(".")


def _bounded(found: list[Found]) -> list[Found]:
    if len(found) > MAX_FOUND:
        raise SourceError(f"it holds {len(found)} adapters, at most {MAX_FOUND} are looked at")
    return sorted(found, key=lambda one: (one.tenant, one.name))


def _plan(found: Found, max_bytes: int) -> list[tuple[SourceFile, str]]:
    """Which files are taken, and what each is called in the stage: shards only where there is no whole file."""
    files = {file.name: file for file in found.files}
    shards = [file for file in found.files if file.name.endswith(".safetensors")]
    if WEIGHTS_FILE in files:
        shards = [files[WEIGHTS_FILE]]
        files.pop(INDEX_FILE, None)
    for needed in (CONFIG_FILE, INDEX_FILE if shards and WEIGHTS_FILE not in files else WEIGHTS_FILE):
        if needed not in files:
            raise AdapterInvalid("file_missing", f"{needed} is missing", needed)
    if len(shards) > MAX_SHARDS or sum(file.size for file in shards) > max_bytes:
        raise AdapterTooLarge("weights_too_large", f"the weights have more than {max_bytes} bytes", WEIGHTS_FILE)
    small = [files[name] for name in _SMALL if name in files]
    for file in small:
        if file.size > _SMALL[file.name]:
            message = f"{file.name} has more than {_SMALL[file.name]} bytes"
            raise AdapterTooLarge("config_too_large", message, file.name)
    return [(file, file.name) for file in small] + [(file, stage_file(number)) for number, file in enumerate(shards)]


@contextmanager
def _opened(root: Path, *names: str) -> Iterator[int]:
    """A directory below `root`, opened step by step: whoever swaps one for a link meanwhile gains nothing."""
    with ExitStack() as stack:
        current = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, current)
        for name in names:
            current = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
            stack.callback(os.close, current)
        yield current
