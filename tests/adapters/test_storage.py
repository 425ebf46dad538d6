from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from adapters.config import canonical
from adapters.spec import AdapterInvalid, AdapterMissing
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore, content_digest

CONFIG = b'{"r": 8, "a": 1}'


def fill(stage: Path, weights: bytes = b"weights", config: bytes = CONFIG) -> Path:
    (stage / CONFIG_FILE).write_bytes(config)
    (stage / WEIGHTS_FILE).write_bytes(weights)
    return stage


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "adapters")


def everything(store: DirectoryStore) -> list[str]:
    """All that lies in the store but locks, relative to its root."""
    root = store.root
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.parent.name != "locks" and p.is_file())


def test_commit_names_by_content(store: DirectoryStore) -> None:
    """The digest is sha256(canonical config ‖ sha256(weights)); the stage is gone, the files are read-only."""
    stage = fill(store.stage())

    digest = store.commit(stage)

    assert digest == hashlib.sha256(canonical(CONFIG) + hashlib.sha256(b"weights").digest()).hexdigest()
    assert content_digest(store.path(digest)) == digest
    assert (store.path(digest) / WEIGHTS_FILE).read_bytes() == b"weights"
    assert not (store.path(digest) / WEIGHTS_FILE).stat().st_mode & 0o222
    assert not stage.exists()
    assert store.digests() == [digest]


def test_equal_content_is_stored_once(store: DirectoryStore) -> None:
    """Other spaces and key order in the config are no other adapter; other weights are."""
    first = store.commit(fill(store.stage()))
    second = store.commit(fill(store.stage(), config=b'{"a":1,"r":8}'))
    other = store.commit(fill(store.stage(), weights=b"other"))

    assert first == second != other
    assert len(everything(store)) == 4
    store.discard(Path("/nonexistent"))


def test_stages_are_private_and_can_be_given_up(store: DirectoryStore) -> None:
    """A stage is readable by its owner only; discarding leaves nothing, and after a commit does nothing."""
    stage = fill(store.stage())
    assert stage.stat().st_mode & 0o777 == 0o700

    store.discard(stage)

    assert everything(store) == []
    committed = fill(store.stage())
    digest = store.commit(committed)
    store.discard(committed)
    assert store.digests() == [digest]


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_half_a_stage_is_not_committed(store: DirectoryStore, missing: str) -> None:
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
    stray = fill(store.stage())
    (stray / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterInvalid):
        store.commit(stray)

    assert store.digests() == []


@pytest.mark.parametrize(
    "digest", ["", "..", "/etc", "../../etc", "a" * 63, "A" * 64, "a" * 64, "a" * 64 + "\n", "\0" * 64]
)
def test_only_digests_are_paths(store: DirectoryStore, digest: str) -> None:
    """AU-05: nothing but 64 hex digits is looked for on the disk, or deleted from it."""
    with pytest.raises(AdapterMissing):
        store.path(digest)
    assert store.delete(digest)


def test_delete_keeps_what_was_committed_again(store: DirectoryStore) -> None:
    """Within the grace after a commit, also one that only found its content there, files stay; after it they go."""
    digest = store.commit(fill(store.stage()))
    old = time.time() - 1000
    os.utime(store.path(digest), (old, old))
    assert store.commit(fill(store.stage())) == digest

    assert not store.delete(digest, grace_s=500)
    assert store.digests() == [digest]
    os.utime(store.path(digest), (old, old))
    assert store.delete(digest, grace_s=500)
    assert everything(store) == []
    with pytest.raises(AdapterMissing):
        store.path(digest)


def test_damage_is_told(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """HS-16: of five stored adapters one was overwritten and one lost a file: these two say why, the others are sound,
    and looking again costs no second reading."""
    digests = [store.commit(fill(store.stage(), weights=b"%d" % number)) for number in range(5)]
    assert [store.problem(digest) for digest in digests] == [None] * 5
    bad, gone = store.path(digests[1]) / WEIGHTS_FILE, store.path(digests[2]) / CONFIG_FILE
    bad.chmod(0o644)
    bad.write_bytes(b"garbage")
    gone.unlink()

    found = [store.problem(digest) for digest in digests]

    assert [problem is None for problem in found] == [True, False, False, True, True]
    assert "no longer what was uploaded" in str(found[1])
    assert store.problem("f" * 64) == "the store does not have this adapter"
    monkeypatch.setattr("adapters.storage.content_digest", lambda _: pytest.fail("read twice"))
    assert store.problem(digests[0]) is None


def test_open_files_outlive_deletion(store: DirectoryStore) -> None:
    """Who has opened a stored file reads it to its end."""
    digest = store.commit(fill(store.stage(), weights=b"w" * 100_000))
    with (store.path(digest) / WEIGHTS_FILE).open("rb") as file:
        assert store.delete(digest)
        assert file.read() == b"w" * 100_000


def test_sweep_takes_only_orphans(store: DirectoryStore) -> None:
    """A stage whose process lives stays however old it is; that of a dead process goes once it is a minute old."""
    mine = fill(store.stage())
    code = (
        "import sys; from pathlib import Path; from adapters.storage import DirectoryStore;"
        f"s = DirectoryStore(Path({str(store.root)!r}));"
        "print(s.stage()); print(s.stage(), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


def test_concurrent_commits_and_deletes(store: DirectoryStore) -> None:
    """Eight threads commit and delete two contents: an entry is always whole, and no error comes up."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(30):
                weights = draw.choice([b"one", b"two"])
                digest = store.commit(fill(store.stage(), weights=weights))
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
    for digest in store.digests():
        assert content_digest(store.path(digest)) == digest
    assert all(not name.startswith("stage/") for name in everything(store))


KILLED = """
import sys
from pathlib import Path
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore

store = DirectoryStore(Path(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    stage = store.stage()
    (stage / CONFIG_FILE).write_text('{"r": 8}')
    (stage / WEIGHTS_FILE).write_bytes(b"%d" % (number % 3) * 200_000)
    digest = store.commit(stage)
    if number % 2:
        store.delete(digest)
    number += 1
"""


def test_kill_at_any_point_leaves_no_half_state(store: DirectoryStore) -> None:
    """HS-16: kill -9 in the middle of uploads and deletions: every entry is whole, the rest is swept, and the locks
    of the dead hold nobody up."""
    draw = random.Random(1)
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(store.root)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.08))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        for digest in store.digests():
            assert content_digest(store.path(digest)) == digest
    for stage in (store.root / "stage").iterdir():
        os.utime(stage, (0, 0))

    store.sweep()

    assert all(not name.startswith("stage/") for name in everything(store))
    digest = store.commit(fill(store.stage()))
    assert store.delete(digest)


def test_the_store_is_empty_again_after_many_cycles(store: DirectoryStore) -> None:
    """HS-04: 150 uploads and deletions leave nothing behind: no file, no stage, no open descriptor."""
    open_before = len(os.listdir("/proc/self/fd"))
    for number in range(150):
        store.delete(store.commit(fill(store.stage(), weights=b"%d" % number)))

    assert everything(store) == []
    assert list((store.root / "stage").iterdir()) == []
    assert len(list((store.root / "locks").iterdir())) <= 256
    assert len(os.listdir("/proc/self/fd")) <= open_before + 1
