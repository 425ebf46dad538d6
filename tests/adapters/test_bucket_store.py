"""What only a store in a bucket does: several machines on one bucket, fetching, caching, cut connections."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from adapters.bucket import NUM_PARTS, PART_BYTES, Bucket, BucketConfig
from adapters.bucket_store import BucketStore
from adapters.disk_cache import MANIFEST
from adapters.loader import Loader
from adapters.spec import AdapterInvalid, AdapterMissing, AdapterRef, AdapterTooLarge
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore, StorageError
from tests.adapters.files import LIMITS, SHAPE, config, pairs, write
from tests.adapters.stored import put, weights_of
from tests.adapters.test_store_contract import spawned
from tests.buckets import Line
from tests.services import free_port

LARGE = sha256(b"large").digest() * (5 * PART_BYTES // 32) + b"end"


def cached(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "cache").iterdir() if path.is_dir())


def test_two_machines_share_a_bucket(tmp_path: Path, bucket: BucketConfig) -> None:
    """What one gateway commits, another machine reads, byte for byte, more than one part of it; what it deletes is gone
    there, too, but for who has it on its disk."""
    here, there = BucketStore(tmp_path / "here", bucket), BucketStore(tmp_path / "there", bucket)
    digest = put(here, LARGE)

    assert weights_of(there, digest) == LARGE
    assert there.problem(digest) is None
    assert here.delete(digest)
    assert there.digests() == []
    assert weights_of(there, digest) == LARGE
    with pytest.raises(AdapterMissing):
        weights_of(BucketStore(tmp_path / "new", bucket), digest)


def test_its_own_upload_is_not_fetched(tmp_path: Path, line: Line) -> None:
    """Where a gateway and an engine share a disk, what was uploaded is read from there."""
    store = BucketStore(tmp_path, line.config)
    digest = put(store, LARGE)

    assert weights_of(BucketStore(tmp_path, line.config), digest) == LARGE
    assert line.gets() == []


def test_half_an_upload_is_not_there(tmp_path: Path, bucket: BucketConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """HS-16: files without a manifest, as a kill in the middle of an upload leaves them, are no adapter; they are swept
    when they are a day old, and other people's objects are not."""
    store, objects = BucketStore(tmp_path, bucket), Bucket(bucket)
    digest, good = "a" * 64, put(store)
    objects.put(f"{digest}/0001-aa/{WEIGHTS_FILE}", b"half")
    objects.put("somebody/else's.json", b"{}")

    assert store.digests() == [good]
    assert store.problem(digest) == "the store does not have this adapter"
    store.sweep()
    assert len(objects.list(digest)) == 1
    monkeypatch.setattr("adapters.bucket_store.ABANDONED", timedelta(seconds=-5))
    store.sweep()
    assert objects.list(digest) == []
    assert len(objects.list("somebody")) == 1
    assert store.digests() == [good]


def test_a_commit_during_a_deletion_stays(
    tmp_path: Path, bucket: BucketConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that deletes what it believes to be old never takes what another one commits at that moment."""
    deleting, committing = BucketStore(tmp_path / "a", bucket), BucketStore(tmp_path / "b", bucket)
    digest = put(deleting)
    remove = deleting._remove

    def remove_late(commits: object) -> None:
        assert put(committing) == digest
        remove(commits)  # type: ignore[arg-type]

    monkeypatch.setattr(deleting, "_remove", remove_late)

    assert deleting.delete(digest)

    fresh = BucketStore(tmp_path / "c", bucket)
    assert (fresh.digests(), fresh.problem(digest)) == ([digest], None)
    assert weights_of(fresh, digest) == b"weights"


def test_equal_commits_leave_one_copy(tmp_path: Path, bucket: BucketConfig) -> None:
    """However many gateways commit the same content, also at a time, the bucket holds it once in the end."""
    stores = [BucketStore(tmp_path / str(number), bucket) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        digests = set(threads.map(put, stores))
    digests.add(put(stores[0]))

    assert len(digests) == 1
    assert len(Bucket(bucket).list()) == 3  # config, weights, manifest


def test_a_cut_connection_is_no_new_start(tmp_path: Path, line: Line) -> None:
    """Connections that break again and again: each attempt goes on where the last one stood, and what arrives is
    right; no part that has arrived is asked for again."""
    digest = put(BucketStore(tmp_path / "there", line.config), LARGE)
    store = BucketStore(tmp_path / "here", line.config)
    line.cut_after = int(1.5 * PART_BYTES)  # each connection carries one part and a half
    before, attempts = line.num_bytes, 0
    while True:
        attempts += 1
        assert attempts < 12
        try:
            assert weights_of(store, digest) == LARGE
            break
        except StorageError:
            (part,) = (tmp_path / "here" / "cache").glob("*.part")
            assert (part / WEIGHTS_FILE).stat().st_size <= len(LARGE)
    line.cut_after = None

    assert cached(tmp_path / "here") == [digest]
    assert line.num_bytes - before < 3 * len(LARGE)


FETCHING = """
import sys, threading, time
from adapters.bucket import Bucket
real = Bucket.get_range
def slow(self, *place):
    time.sleep(0.25)
    return real(self, *place)
Bucket.get_range = slow
print("ready", flush=True)
with store.reading(sys.argv[3] if len(sys.argv) > 3 else sys.stdin.readline().strip()):
    print("done", flush=True)
"""


def test_a_killed_fetch_goes_on_after_a_restart(tmp_path: Path, line: Line) -> None:
    """kill -9 in the middle of a fetch: the next process asks only for what is missing, and the result is right."""
    digest = put(BucketStore(tmp_path / "there", line.config), LARGE)
    child = spawned(FETCHING, tmp_path / "here", line.config)
    assert child.stdin is not None
    child.stdin.write(digest + "\n")
    child.stdin.flush()
    part = tmp_path / "here" / "cache" / f"{digest}.part" / WEIGHTS_FILE
    end = time.monotonic() + 30
    while not (part.is_file() and part.stat().st_size >= NUM_PARTS * PART_BYTES) and time.monotonic() < end:
        time.sleep(0.005)
    child.kill()
    child.communicate()
    assert part.stat().st_size >= NUM_PARTS * PART_BYTES
    arrived, before = part.stat().st_size, line.num_bytes

    assert weights_of(BucketStore(tmp_path / "here", line.config), digest) == LARGE

    assert line.num_bytes - before < len(LARGE) - arrived + (1 << 20)


def test_many_readers_fetch_once(tmp_path: Path, line: Line) -> None:
    """Eight threads and another process that want one adapter at once: its parts cross the line once."""
    digest = put(BucketStore(tmp_path / "there", line.config), LARGE)
    store = BucketStore(tmp_path / "here", line.config)
    child = spawned(FETCHING, tmp_path / "here", line.config)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda _: weights_of(store, digest) == LARGE, range(8))
        out, _ = child.communicate(digest + "\n", timeout=60)

    assert all(found)
    assert out == "done\n"
    assert len(line.gets()) == -(-len(LARGE) // PART_BYTES)


def test_the_cache_keeps_its_limit(tmp_path: Path, bucket: BucketConfig) -> None:
    """The least recently used goes first, also after a restart; what is being read stays; the sum is kept."""
    source = BucketStore(tmp_path / "there", bucket)
    digests = [put(source, bytes([number]) * 1_000_000) for number in range(4)]
    small = replace(bucket, cache_bytes=2_500_000)
    store = BucketStore(tmp_path / "here", small)
    weights_of(store, digests[0])
    weights_of(store, digests[1])
    store = BucketStore(tmp_path / "here", small)
    weights_of(store, digests[0])

    weights_of(store, digests[2])
    assert cached(tmp_path / "here") == sorted([digests[0], digests[2]])
    with store.reading(digests[0]) as directory:
        weights_of(store, digests[3])
        weights_of(store, digests[1])
        assert (directory / WEIGHTS_FILE).read_bytes() == b"\0" * 1_000_000
        assert cached(tmp_path / "here") == sorted([digests[0], digests[1]])
        with store.reading(digests[1]), pytest.raises(StorageError, match="cache is full"):
            weights_of(store, digests[2])
    assert weights_of(store, digests[2]) == b"\2" * 1_000_000


def test_what_can_never_fit_is_refused(tmp_path: Path, bucket: BucketConfig) -> None:
    """An adapter above the limit of the cache is AdapterTooLarge, nothing else is evicted for it, nothing stays."""
    source = BucketStore(tmp_path / "there", bucket)
    small, large = put(source, b"s" * 1000), put(source, b"l" * 100_000)
    store = BucketStore(tmp_path / "here", replace(bucket, cache_bytes=50_000))
    weights_of(store, small)

    with pytest.raises(AdapterTooLarge, match="cache"):
        weights_of(store, large)

    assert weights_of(store, small) == b"s" * 1000
    assert not [name for name in cached(tmp_path / "here") if name != small]


def stored_adapter(root: Path, bucket: BucketConfig) -> AdapterRef:
    """A real one, in the bucket."""
    store = BucketStore(root, bucket)
    return AdapterRef(store.commit(write(store.stage(), pairs(), config())), LIMITS.max_rank)


def test_a_damaged_cache_is_fetched_again(tmp_path: Path, line: Line, caplog: pytest.LogCaptureFixture) -> None:
    """HS-16: a file that was damaged on the local disk is found by its digest and got anew, once, and told of."""
    ref = stored_adapter(tmp_path / "there", line.config)
    store = BucketStore(tmp_path / "here", line.config)
    sound = Loader(SHAPE, torch.float32, 16).load_stored(store, ref)
    path = tmp_path / "here" / "cache" / ref.digest / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff\xff\x7f")

    again = Loader(SHAPE, torch.float32, 16).load_stored(BucketStore(tmp_path / "here", line.config), ref)

    assert torch.equal(sound.buffer, again.buffer)
    assert len(line.gets()) == 2
    assert "damaged" in caplog.text


def test_damage_in_the_bucket_fails_with_its_reason(tmp_path: Path, line: Line) -> None:
    """HS-16: what the bucket itself no longer has right is fetched twice, then adapter_damaged; nothing of it stays."""
    ref = stored_adapter(tmp_path / "there", line.config)
    objects = Bucket(line.config)
    (key,) = (one.key for one in objects.list(ref.digest) if one.key.endswith(WEIGHTS_FILE))
    objects.put(key, objects.get(key)[:-4] + b"\xff\xff\xff\x7f")
    line.requests.clear()

    with pytest.raises(AdapterInvalid) as caught:
        Loader(SHAPE, torch.float32, 16).load_stored(BucketStore(tmp_path / "here", line.config), ref)

    assert (caught.value.code, caught.value.param) == ("adapter_damaged", WEIGHTS_FILE)
    assert len(line.gets()) == 2
    assert cached(tmp_path / "here") == []


@pytest.mark.parametrize("data", [b"short", None])
def test_what_is_cut_or_lost_in_the_bucket_fails_at_once(tmp_path: Path, line: Line, data: bytes | None) -> None:
    """HS-16: a file that is shorter than it was, or gone, is damage, not an outage to wait for: nothing is fetched."""
    ref = stored_adapter(tmp_path / "there", line.config)
    objects = Bucket(line.config)
    (key,) = (one.key for one in objects.list(ref.digest) if one.key.endswith(WEIGHTS_FILE))
    objects.delete([key]) if data is None else objects.put(key, data)

    with pytest.raises(AdapterInvalid) as caught:
        Loader(SHAPE, torch.float32, 16).load_stored(BucketStore(tmp_path / "here", line.config), ref)

    assert caught.value.code == "adapter_damaged"
    assert line.gets() == []
    assert cached(tmp_path / "here") == []


def test_a_local_store_can_renew_nothing(tmp_path: Path) -> None:
    """HS-16: where there is no other copy, damage is told at once."""
    store = DirectoryStore(tmp_path)
    ref = AdapterRef(store.commit(write(store.stage(), pairs(), config())), 16)
    path = store.path(ref.digest) / WEIGHTS_FILE
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(AdapterInvalid, match="no longer what was uploaded"):
        Loader(SHAPE, torch.float32, 16).load_stored(store, ref)


def test_the_cache_needs_no_bucket(tmp_path: Path, bucket: BucketConfig) -> None:
    """What is on the disk serves while the bucket is away; the rest is StorageError, and is told as such."""
    digest = put(BucketStore(tmp_path, bucket), b"here")
    away = replace(bucket, options=bucket.options | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"})
    store = BucketStore(tmp_path, away)

    assert weights_of(store, digest) == b"here"
    with pytest.raises(StorageError):
        weights_of(store, "a" * 64)
    with pytest.raises(StorageError):
        put(store, b"new")
    assert "does not answer" in str(store.problem(digest))
    assert cached(tmp_path) == [digest]


def test_a_silent_bucket_gives_threads_back(tmp_path: Path, bucket: BucketConfig) -> None:
    """A server that refuses connections holds a reader for a moment: others get their turn between its attempts."""
    away = replace(bucket, options=bucket.options | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"})
    start = time.monotonic()

    with pytest.raises(StorageError):
        weights_of(BucketStore(tmp_path, away), "a" * 64)

    assert time.monotonic() - start < 5


def test_secrets_are_not_told(tmp_path: Path, bucket: BucketConfig) -> None:
    """Neither the configuration nor an error shows the secret key; a bucket that isn't there is a StorageError or a
    missing file, not an empty store."""
    closed = replace(bucket, url="s3://no-such-bucket/x", options=bucket.options | {"AWS_SECRET_ACCESS_KEY": "hush"})
    with pytest.raises(OSError, match="no-such-bucket") as caught:
        put(BucketStore(tmp_path, closed))

    assert "hush" not in repr(closed) + str(caught.value)


def test_a_cache_of_a_power_cut_is_repaired(tmp_path: Path, bucket: BucketConfig) -> None:
    """A part that holds other bytes than were written, or a torn manifest, costs a second fetch and no more."""
    digest = put(BucketStore(tmp_path / "there", bucket), LARGE)
    part = tmp_path / "here" / "cache" / f"{digest}.part"
    part.mkdir(parents=True)
    (part / MANIFEST).write_bytes(b'{"fi')
    (part / WEIGHTS_FILE).write_bytes(b"\0" * PART_BYTES)
    (part / CONFIG_FILE).write_bytes(b"\0" * 10_000)

    assert weights_of(BucketStore(tmp_path / "here", bucket), digest) == LARGE


def test_sweep_forgets_abandoned_fetches(tmp_path: Path, bucket: BucketConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that nobody went on with for a day is removed; a younger one stays."""
    store = BucketStore(tmp_path, bucket)
    part = tmp_path / "cache" / f"{'a' * 64}.part"
    part.mkdir()
    (part / WEIGHTS_FILE).write_bytes(b"x")

    store.sweep()
    assert part.exists()
    monkeypatch.setattr("adapters.disk_cache.PART_AGE_S", -1.0)
    store.sweep()
    assert not part.exists()


def test_eviction_and_reading_race(tmp_path: Path, bucket: BucketConfig) -> None:
    """Four threads read four adapters through a cache that has room for two: every byte is right, nobody fails."""
    source = BucketStore(tmp_path / "there", bucket)
    digests = [put(source, bytes([number]) * 100_000) for number in range(4)]
    store = BucketStore(tmp_path / "here", replace(bucket, cache_bytes=450_000))
    wrong: list[object] = []

    def work(seed: int) -> None:
        for turn in range(12):
            number = (seed + turn) % 4
            try:
                if weights_of(store, digests[number]) != bytes([number]) * 100_000:
                    wrong.append(number)
            except StorageError as error:
                if "cache is full" not in str(error):  # all four may be on their way at once: tried again later
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert (
        sum((tmp_path / "here" / "cache" / name / WEIGHTS_FILE).stat().st_size for name in cached(tmp_path / "here"))
        <= 450_000
    )
