"""BucketStore: an AdapterStore in an S3-compatible bucket. Uploads are staged, and what is read is cached, on the local
disk. No locks: whatever is in the bucket never changes, and each commit writes objects of its own.

    prefix/<digest>/<commit>/<file>   the files
    prefix/<digest>/<commit>.json     the manifest, written last: what has none is not there

<commit> begins with the time, so commits have an order. One removes those before it once it is visible; equal content
that is committed twice at a time leaves the later one. delete() removes the commits that it saw, and only if the last
of them is older than the grace: one that comes meanwhile stays (docs/decisions/0004).
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import msgspec

from adapters.bucket import Bucket, BucketConfig, Stored
from adapters.disk_cache import DiskCache, File, Manifest
from adapters.spec import AdapterInvalid, AdapterMissing
from adapters.stages import Stages
from adapters.storage import DAMAGED, AdapterStore, DirectoryStore, StorageError, is_digest, missing, seal

ABANDONED = timedelta(days=1)
"""Objects without a manifest are those of an upload that never ended, when they are so old."""
SOUND_S = 60.0
"""So long an adapter that was found sound is not looked at again."""
SILENT_S = 5.0
"""So long a bucket that does not answer is not asked again how an adapter is."""
HEADER_BYTES = 8 + (4 << 20)
"""What of the weights is got for an outline."""


class Commit:
    """One commit of an adapter: a Source of its files."""

    def __init__(self, bucket: Bucket, marker: Stored) -> None:
        self.marker = marker
        self._bucket = bucket
        self._manifest: Manifest | None = None

    @property
    def prefix(self) -> str:
        return self.marker.key.removesuffix(".json")

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            try:
                self._manifest = msgspec.json.decode(self._bucket.get(self.marker.key), type=Manifest)
            except msgspec.DecodeError as error:
                raise StorageError(f"{self.marker.key} is no manifest: {error}") from error
        return self._manifest

    def get(self, name: str, start: int, end: int) -> bytes:
        return self._bucket.get_range(f"{self.prefix}/{name}", start, end)

    def stored(self) -> dict[str, Stored]:
        """What there is of its files, by name."""
        return {one.key.rpartition("/")[2]: one for one in self._bucket.list(self.prefix)}

    def is_whole(self) -> bool:
        """Every file is there, with as many bytes as it should have."""
        stored = self.stored()
        return all(name in stored and stored[name].size == file.size for name, file in self.manifest.files.items())


class BucketStore:
    """An AdapterStore in a bucket. `root` is a local directory for stages and cache, which processes may share."""

    def __init__(self, root: Path, config: BucketConfig) -> None:
        self._bucket = Bucket(config)
        self._stages = Stages(root / "stage")
        self._cache = DiskCache(root / "cache", self._stages, config.cache_bytes)
        self._sweep_disk()
        self._sound_until: dict[str, float] = {}
        self._silence: tuple[float, str] = (0.0, "")

    def stage(self) -> Path:
        return self._stages.make()

    def discard(self, stage: Path) -> None:
        self._stages.remove(stage)

    def commit(self, stage: Path) -> str:
        """Raises AdapterInvalid (see seal), OSError; the stage is then still there."""
        found = seal(stage)
        prefix = f"{found.digest}/{time.time_ns():016x}-{secrets.token_hex(4)}"
        files = {}
        for name, checksum in found.files.items():
            tag = self._bucket.put(f"{prefix}/{name}", stage / name)
            files[name] = File((stage / name).stat().st_size, checksum, tag)
        manifest = Manifest(files)
        self._bucket.put(f"{prefix}.json", msgspec.json.encode(manifest))
        self._remove([one for one in self._commits(found.digest) if one.prefix < prefix])
        self._cache.drop(found.digest)
        if self._cache.adopt(found.digest, stage, manifest):
            self._stages.release(stage)
        else:
            self._stages.remove(stage)
        return found.digest

    @contextmanager
    def reading(self, digest: str) -> Iterator[Path]:
        while True:
            with self._cache.reading(digest) as directory:
                if directory is not None:
                    yield directory
                    return
            self._cache.fetch(digest, self._whole(digest))

    @contextmanager
    def outline(self, digest: str) -> Iterator[Path]:
        with self._cache.reading(digest) as directory:
            if directory is not None:
                yield directory
                return
        stage = self._stages.make()
        try:
            newest = self._newest(digest)
            for name, file in newest.manifest.files.items():
                with (stage / name).open("xb") as target:
                    target.write(newest.get(name, 0, min(file.size, HEADER_BYTES)))
                    target.truncate(file.size)
            yield stage
        finally:
            self._stages.remove(stage)

    def read(self, digest: str, name: str) -> bytes | None:
        newest = self._newest(digest)
        file = newest.manifest.files.get(name)
        if file is None:
            return None
        data = newest.get(name, 0, file.size) if file.size else b""
        if sha256(data).hexdigest() != file.sha256:
            raise StorageError(f"{name} of an adapter: {DAMAGED}")
        return data

    def renew(self, digest: str) -> bool:
        return self._cache.drop(digest)

    def delete(self, digest: str, grace_s: float = 0.0) -> bool:
        if not is_digest(digest):
            return True
        commits = self._commits(digest)
        if commits and grace_s > 0:
            newest = max(one.marker.modified for one in commits)
            if datetime.now(UTC) - newest < timedelta(seconds=grace_s):
                return False
        self._remove(commits)
        self._sound_until.pop(digest, None)
        self._cache.drop(digest)
        return True

    def problem(self, digest: str) -> str | None:
        """Compares sizes and tags; reads only what has another tag than when it was put there."""
        now = time.monotonic()
        if self._sound_until.get(digest, 0.0) > now:
            return None
        if self._silence[0] > now:
            return self._silence[1]
        try:
            newest = self._newest(digest)
            stored = newest.stored()
            if not all(self._is_sound(file, stored.get(name)) for name, file in newest.manifest.files.items()):
                return DAMAGED
        except AdapterMissing as error:
            return error.message
        except OSError as error:
            self._silence = now + SILENT_S, f"the storage does not answer: {error}"
            return self._silence[1]
        self._sound_until[digest] = now + SOUND_S
        return None

    def digests(self) -> list[str]:
        return sorted({one.key.split("/")[0] for one in self._bucket.list() if _is_marker(one.key)})

    def sweep(self) -> int:
        """Objects that no manifest will ever speak of go, too."""
        now = datetime.now(UTC)
        found: defaultdict[str, list[Stored]] = defaultdict(list)
        for one in self._bucket.list():
            found["/".join(one.key.split("/")[:2]).removesuffix(".json")].append(one)
        self._bucket.delete(
            one.key
            for objects in found.values()
            if not any(_is_marker(one.key) for one in objects)
            for one in objects
            if is_digest(one.key.split("/")[0]) and now - one.modified > ABANDONED
        )
        return self._sweep_disk()

    def _sweep_disk(self) -> int:
        self._cache.sweep()
        return self._stages.sweep()

    def _commits(self, digest: str) -> list[Commit]:
        """Oldest first. Raises AdapterMissing for what is no digest."""
        if not is_digest(digest):
            raise missing()
        return [Commit(self._bucket, one) for one in self._bucket.list(digest) if _is_marker(one.key)]

    def _newest(self, digest: str) -> Commit:
        commits = self._commits(digest)
        if not commits:
            raise missing()
        return commits[-1]

    def _whole(self, digest: str) -> Commit:
        """The newest, if nothing of it is missing. Raises AdapterMissing, AdapterInvalid."""
        while True:
            newest = self._newest(digest)
            if newest.is_whole():
                return newest
            if self._newest(digest).prefix == newest.prefix:  # else it was removed for a newer one just now
                raise AdapterInvalid("adapter_damaged", DAMAGED)

    def _remove(self, commits: Iterable[Commit]) -> None:
        """Manifests first: what is left of the rest, if we are stopped here, sweep() finds."""
        gone = list(commits)
        self._bucket.delete(one.marker.key for one in gone)
        for one in gone:
            self._bucket.delete(stored.key for stored in self._bucket.list(one.prefix))

    def _is_sound(self, file: File, stored: Stored | None) -> bool:
        if stored is None or stored.size != file.size:
            return False
        if stored.tag == file.tag:
            return True
        checksum = sha256()
        for start in range(0, file.size, HEADER_BYTES):
            checksum.update(self._bucket.get_range(stored.key, start, min(file.size, start + HEADER_BYTES)))
        return checksum.hexdigest() == file.sha256


def _is_marker(key: str) -> bool:
    return key.count("/") == 1 and key.endswith(".json") and is_digest(key.split("/")[0])


def open_store(root: Path, bucket: BucketConfig | None) -> AdapterStore:
    """The store in the local directory `root`, or in a bucket, with `root` for stages and cache."""
    return DirectoryStore(root) if bucket is None else BucketStore(root, bucket)
