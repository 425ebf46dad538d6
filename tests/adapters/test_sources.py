"""What lies in a watched source, in a directory and in a bucket, and what of it is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adapters.bucket import Bucket, BucketConfig
from adapters.shards import INDEX_FILE, stage_file
from adapters.sources import AdapterSource, open_source
from adapters.spec import AdapterError
from adapters.storage import COMPANION_FILES, CONFIG_FILE, WEIGHTS_FILE, StorageError
from tests.buckets import CREDENTIALS


class Place:
    """A source that a test writes into."""

    def __init__(self, root: Path, bucket: BucketConfig | None) -> None:
        self._root = root
        self._bucket = None if bucket is None else Bucket(bucket)
        place, options = (str(root), {}) if bucket is None else (bucket.url, bucket.options)
        self.source: AdapterSource = open_source(place, options, allow_private=True)

    def put(self, path: str, data: bytes = b"x") -> None:
        if self._bucket is not None:
            self._bucket.put(path, data)
            return
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).write_bytes(data)

    def found(self) -> dict[str, list[str]]:
        return {f"{one.tenant}/{one.name}": [file.name for file in one.files] for one in self.source.scan()}

    def mark(self) -> str:
        (one,) = self.source.scan()
        return one.mark


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    root = tmp_path / "source"
    root.mkdir()
    return Place(root, request.getfixturevalue("bucket") if request.param == "bucket" else None)


def copied(place: Place, stage: Path, max_bytes: int = 1000) -> dict[str, bytes]:
    stage.mkdir()
    (one,) = place.source.scan()
    place.source.copy(one, stage, max_bytes)
    return {path.name: path.read_bytes() for path in stage.iterdir()}


def test_two_directories_are_tenant_and_name(place: Place) -> None:
    """Files at tenant/name/ are an adapter's, those of PEFT and no others; what lies higher or deeper is nobody's."""
    for path in (
        f"acme/a/{CONFIG_FILE}", f"acme/a/{WEIGHTS_FILE}", "acme/a/README.md", "acme/a/training_args.bin",
        f"acme/b/{COMPANION_FILES[0]}", f"other/a/checkpoint-1/{WEIGHTS_FILE}", f"acme/{WEIGHTS_FILE}", WEIGHTS_FILE,
        f".hidden/a/{CONFIG_FILE}", f"acme/.a.tmp/{CONFIG_FILE}", f"{'t' * 65}/a/{CONFIG_FILE}",
    ):  # fmt: skip
        place.put(path)

    found = place.found()
    found.pop("other/a", None)  # a directory without files of its own is there in one kind only
    assert found == {"acme/a": [CONFIG_FILE, WEIGHTS_FILE], "acme/b": [COMPANION_FILES[0]]}


def test_a_mark_moves_with_the_content(place: Place) -> None:
    """Another byte, another file, one file less: another mark; the same at every look in between."""
    place.put(f"acme/a/{CONFIG_FILE}", b"{}")
    marks = [place.mark()]
    for name, data in ((CONFIG_FILE, b"[]"), (WEIGHTS_FILE, b"w"), (COMPANION_FILES[1], b"{}"), ("README.md", b"new")):
        place.put(f"acme/a/{name}", data)
        marks += [place.mark(), place.mark()]

    assert marks[1:] == [mark for mark in marks[1::2] for _ in range(2)]
    assert len(set(marks)) == 4


def test_files_come_under_names_of_the_stage(place: Place, tmp_path: Path) -> None:
    """Config, weights and companions are copied as they are; shards beside whole weights are left."""
    place.put(f"acme/a/{CONFIG_FILE}", b"{}")
    place.put(f"acme/a/{WEIGHTS_FILE}", b"weights")
    place.put(f"acme/a/{COMPANION_FILES[0]}", b"template")
    place.put(f"acme/a/{INDEX_FILE}", b"{}")
    place.put("acme/a/model-1.safetensors", b"shard")

    assert copied(place, tmp_path / "s") == {
        CONFIG_FILE: b"{}", WEIGHTS_FILE: b"weights", COMPANION_FILES[0]: b"template"
    }  # fmt: skip


def test_shards_come_in_the_order_of_their_names(place: Place, tmp_path: Path) -> None:
    """As an upload's: the index and stage_file(0), stage_file(1), …"""
    for name, data in ((CONFIG_FILE, b"{}"), (INDEX_FILE, b"{}"), ("m-2.safetensors", b"2"), ("m-1.safetensors", b"1")):
        place.put(f"acme/a/{name}", data)

    assert copied(place, tmp_path / "s") == {
        CONFIG_FILE: b"{}", INDEX_FILE: b"{}", stage_file(0): b"1", stage_file(1): b"2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "code", "param"),
    [
        ({}, "file_missing", CONFIG_FILE),
        ({CONFIG_FILE: 2}, "file_missing", WEIGHTS_FILE),
        ({WEIGHTS_FILE: 2}, "file_missing", CONFIG_FILE),
        ({CONFIG_FILE: 2, "m-1.safetensors": 2}, "file_missing", INDEX_FILE),
        ({CONFIG_FILE: 2, INDEX_FILE: 2}, "file_missing", WEIGHTS_FILE),
        ({CONFIG_FILE: 2, WEIGHTS_FILE: 1001}, "weights_too_large", WEIGHTS_FILE),
        ({CONFIG_FILE: 70_000, WEIGHTS_FILE: 2}, "config_too_large", CONFIG_FILE),
    ],
)
def test_what_is_incomplete_or_too_large_is_not_copied(
    place: Place, tmp_path: Path, files: dict[str, int], code: str, param: str
) -> None:
    """Refused by name before a byte is read."""
    place.put("acme/a/generation_config.json", b"{}")
    for name, size in files.items():
        place.put(f"acme/a/{name}", b"x" * size)

    with pytest.raises(AdapterError) as caught:
        copied(place, tmp_path / "s")

    assert (caught.value.code, caught.value.param) == (code, param)
    assert list((tmp_path / "s").iterdir()) == []


def test_no_link_is_followed(tmp_path: Path) -> None:
    """AU-05: a link in the place of a tenant, an adapter or a file is as if it were not there, also one that is put
    there between look and copy."""
    secret = tmp_path / "secret"
    (secret / "a").mkdir(parents=True)
    (secret / "a" / CONFIG_FILE).write_bytes(b"secret")
    (secret / "a" / WEIGHTS_FILE).write_bytes(b"secret")
    place = Place(tmp_path / "source", None)
    place.put(f"acme/a/{CONFIG_FILE}")
    place.put(f"acme/a/{WEIGHTS_FILE}")
    root = tmp_path / "source"
    (root / "linked").symlink_to(secret)
    (root / "acme" / "b").symlink_to(secret / "a")
    (root / "acme" / "a" / COMPANION_FILES[0]).symlink_to(secret / "a" / CONFIG_FILE)
    assert place.found() == {"acme/a": [CONFIG_FILE, WEIGHTS_FILE]}
    (one,) = place.source.scan()

    for swap in ("file", "adapter", "tenant"):
        target = {"file": root / "acme" / "a" / WEIGHTS_FILE, "adapter": root / "acme" / "a", "tenant": root / "acme"}
        true = {"file": secret / "a" / WEIGHTS_FILE, "adapter": secret / "a", "tenant": secret}
        os.rename(target[swap], tmp_path / swap)
        target[swap].symlink_to(true[swap])
        stage = tmp_path / f"stage-{swap}"
        stage.mkdir()
        with pytest.raises(OSError, match=r"symbolic link|Not a directory"):
            place.source.copy(one, stage, 1000)
        assert b"secret" not in b"".join(path.read_bytes() for path in stage.iterdir())
        target[swap].unlink()
        os.rename(tmp_path / swap, target[swap])


def test_special_files_are_nothing(tmp_path: Path) -> None:
    """A pipe in the place of the weights blocks nobody."""
    place = Place(tmp_path, None)
    place.put(f"acme/a/{CONFIG_FILE}")
    os.mkfifo(tmp_path / "acme" / "a" / WEIGHTS_FILE)

    assert place.found() == {"acme/a": [CONFIG_FILE]}


def test_what_changes_while_it_is_copied_is_left(tmp_path: Path) -> None:
    """A file that is another one than at the look is an OSError: the next look sees it anew."""
    place = Place(tmp_path / "source", None)
    place.put(f"acme/a/{CONFIG_FILE}", b"{}")
    place.put(f"acme/a/{WEIGHTS_FILE}", b"half")
    (one,) = place.source.scan()
    place.put(f"acme/a/{WEIGHTS_FILE}", b"whole")

    with pytest.raises(StorageError, match="changes"):
        place.source.copy(one, tmp_path, 1000)


def test_a_source_that_is_away_is_an_error(tmp_path: Path, bucket: BucketConfig) -> None:
    """Not an empty one."""
    with pytest.raises(FileNotFoundError):
        open_source(str(tmp_path / "none"), {}, False).scan()
    with pytest.raises(StorageError, match="no-such-bucket"):
        open_source("s3://no-such-bucket/x", bucket.options, True).scan()


def test_a_bucket_with_too_many_objects_is_an_error(bucket: BucketConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in it besides adapters is not held in memory without end."""
    monkeypatch.setattr("adapters.sources.MAX_OBJECTS", 3)
    objects = Bucket(bucket)
    for number in range(3):
        objects.put(f"junk-{number}", b"x")
    source = open_source(bucket.url, bucket.options, True)
    assert source.scan() == []
    objects.put("junk-3", b"x")
    with pytest.raises(StorageError, match="more than 3 objects"):
        source.scan()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9000", "http://localhost", "http://[::1]/", "http://10.1.2.3", "http://192.168.0.1:1",
            "http://169.254.169.254/latest", "http://0.0.0.0", "http://[fd00::1]", "http://no-such-host.invalid"]
)  # fmt: skip
def test_private_addresses_are_refused(url: str) -> None:
    """A source's server is of the public internet, unless the operator says otherwise."""
    with pytest.raises(OSError, match=r"is a private address|no-such-host"):
        open_source("s3://b/x", {**CREDENTIALS, "AWS_ENDPOINT_URL": url}, allow_private=False).scan()
