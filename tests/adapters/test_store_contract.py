"""What every AdapterStore promises: a local directory and a bucket of a real S3 API."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from adapters.bucket import BucketConfig
from adapters.bucket_store import BucketStore, open_store
from adapters.config import canonical
from adapters.spec import AdapterInvalid, AdapterMissing
from adapters.storage import COMPANION_FILES, CONFIG_FILE, WEIGHTS_FILE, AdapterStore, DirectoryStore, content_digest
from tests.adapters.stored import CONFIG, fill, put, weights_of

KINDS = ("directory", "bucket")
GRACE_S = 5.0
Opener = Callable[[], AdapterStore]


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest) -> BucketConfig | None:
    """Where the store is: in its directory, or in a bucket."""
    return request.getfixturevalue("bucket") if request.param == "bucket" else None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


@pytest.fixture
def store(root: Path, config: BucketConfig | None) -> AdapterStore:
    return open_store(root, config)


def stages(store: AdapterStore, root: Path) -> list[Path]:
    return list((root / "stage").iterdir())


def age(store: AdapterStore, digest: str, grace_s: float) -> None:
    """Makes what is stored older than `grace_s`; a bucket's clock can only be waited for, and counts whole seconds."""
    if isinstance(store, DirectoryStore):
        os.utime(store.path(digest), (time.time() - grace_s - 1,) * 2)
    else:
        time.sleep(grace_s + 1)


def damage(store: AdapterStore, digest: str, name: str, data: bytes | None) -> None:
    """Overwrites a stored file behind the store's back, or removes it (None)."""
    if isinstance(store, DirectoryStore):
        path = store.path(digest) / name
        path.chmod(0o644)
        path.unlink() if data is None else path.write_bytes(data)
        return
    assert isinstance(store, BucketStore)
    (key,) = (one.key for one in store._bucket.list(digest) if one.key.endswith(f"/{name}"))
    store._bucket.delete([key]) if data is None else store._bucket.put(key, data)


def test_commit_names_by_content(store: AdapterStore) -> None:
    """The digest is sha256(canonical config ‖ sha256(weights)); the stage is gone, the files are there."""
    stage = fill(store.stage())

    digest = store.commit(stage)

    assert digest == hashlib.sha256(canonical(CONFIG) + hashlib.sha256(b"weights").digest()).hexdigest()
    assert not stage.exists()
    assert store.digests() == [digest]
    with store.reading(digest) as directory:
        assert content_digest(directory) == digest
        assert (directory / WEIGHTS_FILE).read_bytes() == b"weights"
        assert (directory / CONFIG_FILE).read_bytes() == canonical(CONFIG)


def test_equal_content_is_stored_once(store: AdapterStore) -> None:
    """Other spaces and key order in the config are no other adapter; other weights are."""
    first, second = put(store), put(store, config=b'{"a":1,"r":8}')
    other = put(store, b"other")

    assert first == second != other
    assert store.digests() == sorted([first, other])
    assert (weights_of(store, first), weights_of(store, other)) == (b"weights", b"other")


def test_companions_are_part_of_the_digest(store: AdapterStore) -> None:
    """A template or defaults beside the weights make another adapter, and can be read without the weights; what isn't
    there is None, and no other file is let in."""
    plain = put(store)
    digests = {plain}
    for name in COMPANION_FILES:
        stage = fill(store.stage())
        (stage / name).write_bytes(b"{}")
        digest = store.commit(stage)
        digests.add(digest)
        assert (store.read(digest, name), store.read(plain, name)) == (b"{}", None)
        with store.reading(digest) as directory:
            assert content_digest(directory) == digest
            assert (directory / name).read_bytes() == b"{}"
        assert store.problem(digest) is None
    assert len(digests) == 1 + len(COMPANION_FILES)
    assert store.read(plain, CONFIG_FILE) == canonical(CONFIG)
    with pytest.raises(AdapterMissing):
        store.read("f" * 64, CONFIG_FILE)


def test_stages_are_private_and_can_be_given_up(store: AdapterStore, root: Path) -> None:
    """A stage is readable by its owner only; discarding leaves nothing, and after a commit does nothing."""
    stage = fill(store.stage())
    assert stage.stat().st_mode & 0o777 == 0o700

    store.discard(stage)

    assert (stages(store, root), store.digests()) == ([], [])
    committed = fill(store.stage())
    digest = store.commit(committed)
    store.discard(committed)
    store.discard(Path("/nonexistent"))
    assert store.digests() == [digest]


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_half_a_stage_is_not_committed(store: AdapterStore, missing: str) -> None:
    """A missing file, a broken config, a stray file or a link: AdapterInvalid, and nothing in the store."""
    stage = fill(store.stage())
    (stage / missing).unlink()
    with pytest.raises(AdapterInvalid):
        store.commit(stage)
    (stage / missing).symlink_to("/etc/passwd")
    with pytest.raises(AdapterInvalid):
        store.commit(stage)
    with pytest.raises(AdapterInvalid):
        store.commit(fill(store.stage(), config=b"{"))
    stray, link = fill(store.stage()), fill(store.stage())
    (stray / "adapter_model.bin").write_bytes(b"")
    (link / COMPANION_FILES[0]).symlink_to("/nonexistent")
    for stage in (stray, link):
        with pytest.raises(AdapterInvalid):
            store.commit(stage)

    assert store.digests() == []


@pytest.mark.parametrize(
    "digest", ["", "..", "/etc", "../../etc", "a" * 63, "A" * 64, "a" * 64, "a" * 64 + "\n", "\0" * 64]
)
def test_only_digests_are_paths(store: AdapterStore, digest: str) -> None:
    """AU-05: nothing but 64 hex digits is looked for, or deleted."""
    with pytest.raises(AdapterMissing), store.reading(digest):
        pass
    with pytest.raises(AdapterMissing), store.outline(digest):
        pass
    assert store.problem(digest) == "the store does not have this adapter"
    assert store.delete(digest)


def test_delete_keeps_what_was_committed_again(store: AdapterStore, root: Path) -> None:
    """Within the grace after a commit, also one that only found its content there, files stay; after it they go."""
    digest = put(store)
    age(store, digest, GRACE_S)
    assert put(store) == digest

    assert not store.delete(digest, grace_s=GRACE_S)
    assert store.digests() == [digest]
    age(store, digest, GRACE_S)
    assert store.delete(digest, grace_s=GRACE_S)
    assert (store.digests(), stages(store, root)) == ([], [])
    with pytest.raises(AdapterMissing), store.reading(digest):
        pass


def test_damage_is_told_and_mended(root: Path, config: BucketConfig | None) -> None:
    """HS-16: of five stored adapters one was overwritten, one with as many bytes, and one lost a file: these say why,
    the others are sound; committing the same content again mends it."""
    store = open_store(root, config)
    digests = [put(store, b"weights%d" % number) for number in range(5)]
    assert [store.problem(digest) for digest in digests] == [None] * 5
    damage(store, digests[1], WEIGHTS_FILE, b"garbage")
    damage(store, digests[2], WEIGHTS_FILE, b"weights5")
    damage(store, digests[3], CONFIG_FILE, None)

    restarted = open_store(root, config)
    found = [restarted.problem(digest) for digest in digests]

    assert [problem is None for problem in found] == [True, False, False, False, True]
    assert "no longer what was uploaded" in str(found[1])
    assert restarted.problem("f" * 64) == "the store does not have this adapter"
    for number in range(5):
        assert put(restarted, b"weights%d" % number) == digests[number]
    assert [open_store(root, config).problem(digest) for digest in digests] == [None] * 5


def test_an_outline_has_header_and_size(store: AdapterStore) -> None:
    """What an adapter is can be seen without reading its weights."""
    header = b"\x02\0\0\0\0\0\0\0{}"
    digest = put(store, header + b"x" * (5 << 20))

    with store.outline(digest) as directory:
        weights = directory / WEIGHTS_FILE
        assert weights.stat().st_size == len(header) + (5 << 20)
        assert weights.read_bytes().startswith(header)
        assert (directory / CONFIG_FILE).read_bytes() == canonical(CONFIG)


def test_reading_outlives_deletion(store: AdapterStore) -> None:
    """Who reads an adapter reads it to its end, whatever happens to it meanwhile."""
    digest = put(store, b"w" * 100_000)
    with store.reading(digest) as directory, (directory / WEIGHTS_FILE).open("rb") as file:
        assert store.delete(digest)
        assert file.read() == b"w" * 100_000


def spawned(code: str, root: Path, config: BucketConfig | None) -> subprocess.Popen[str]:
    """A process that has `store` on the same place."""
    start = (
        "import sys, msgspec; from pathlib import Path; from adapters.bucket import BucketConfig;"
        "from adapters.bucket_store import open_store; from tests.adapters.stored import fill, put;"
        "config = msgspec.json.decode(sys.argv[2], type=BucketConfig | None);"
        "store = open_store(Path(sys.argv[1]), config)\n"
    )
    command = [sys.executable, "-c", start + code, str(root), msgspec.json.encode(config).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_sweep_takes_only_orphans(store: AdapterStore, root: Path, config: BucketConfig | None) -> None:
    """A stage whose process lives stays however old it is; that of a dead process goes once it is a minute old."""
    mine = fill(store.stage())
    child = spawned("print(store.stage()); print(store.stage(), flush=True); sys.stdin.read()", root, config)
    assert child.stdout is not None
    theirs, young = (Path(child.stdout.readline().strip()) for _ in range(2))
    old = time.time() - 1000
    for stage in (mine, theirs):
        os.utime(stage, (old, old))

    assert store.sweep() == 0
    child.kill()
    child.communicate()
    assert store.sweep() == 1
    assert (mine.exists(), theirs.exists(), young.exists()) == (True, False, True)


def test_concurrent_commits_and_deletes(root: Path, config: BucketConfig | None) -> None:
    """Eight threads of two gateways commit and delete two contents: what is there is always whole, and no error comes
    up; what was committed last, and never deleted after, is there."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        store = open_store(root if config is None else root / str(seed % 2), config)
        try:
            for _ in range(10 if config else 30):
                digest = put(store, draw.choice([b"one", b"two"]))
                if draw.random() < 0.5:
                    store.delete(digest)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    fresh = open_store(root.with_name("fresh") if config else root, config)
    for digest in fresh.digests():
        with fresh.reading(digest) as directory:
            assert content_digest(directory) == digest
    last = put(fresh, b"one")
    assert last in fresh.digests()


KILLED = """
print("ready", flush=True)
number = 0
while True:
    digest = put(store, b"%d" % (number % 3) * 200_000)
    if number % 2:
        store.delete(digest)
    number += 1
"""


def test_kill_at_any_point_leaves_no_half_state(root: Path, config: BucketConfig | None) -> None:
    """HS-16: kill -9 in the middle of uploads and deletions: every adapter is whole, the rest is swept, and the locks
    of the dead hold nobody up."""
    draw = random.Random(1)
    for turn in range(6):
        child = spawned(KILLED, root, config)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.08 if config is None else 0.4))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        seen = open_store(root if config is None else root.with_name(f"other-{turn}"), config)
        for digest in seen.digests():
            with seen.reading(digest) as directory:
                assert content_digest(directory) == digest
    store = open_store(root, config)
    for stage in stages(store, root):
        os.utime(stage, (0, 0))

    store.sweep()

    assert stages(store, root) == []
    digest = put(store)
    assert store.delete(digest)


def test_the_store_is_empty_again_after_many_cycles(store: AdapterStore, root: Path) -> None:
    """HS-04: uploads and deletions leave nothing behind: no file, no stage, no open descriptor."""
    is_local = isinstance(store, DirectoryStore)
    store.delete(put(store))
    open_before = len(os.listdir("/proc/self/fd"))
    for number in range(150 if is_local else 15):
        store.delete(put(store, b"%d" % number))

    assert (store.digests(), stages(store, root)) == ([], [])
    assert {path.parent.name for path in root.rglob("*") if path.is_file()} <= {"locks", "cache"}
    assert len(list(root.rglob("*"))) <= 256 + 6
    assert len(os.listdir("/proc/self/fd")) <= open_before + 1
    if isinstance(store, BucketStore):
        assert store._bucket.list() == []
