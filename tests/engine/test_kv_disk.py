"""DiskTier: what is read is, byte for byte, what was written under this key, or it is not read at all."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.kv_disk import DiskTier
from engine.kv_traffic import Transfer

BYTES = 4000
KEY, OTHER = bytes(range(48)), bytes(range(1, 49))


class Place:
    """A disk tier over 4 slots of memory."""

    def __init__(self, directory: Path) -> None:
        self.memory = [bytearray(os.urandom(BYTES)) for _ in range(4)]
        self.disk = DiskTier(directory, BYTES, lambda slot: memoryview(self.memory[slot]))

    def done(self) -> Transfer:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for transfer in self.disk.poll():
                return transfer
            time.sleep(0.001)
        raise AssertionError("the disk does not answer")

    def write(self, key: bytes, slot: int) -> Transfer:
        self.disk.write(key, slot)
        return self.done()

    def read(self, key: bytes, slot: int) -> Transfer:
        self.disk.read(key, slot)
        return self.done()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def place(directory: Path) -> Iterator[Place]:
    place = Place(directory)
    yield place
    place.disk.close()


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "lock")


def test_a_block_survives_a_restart(place: Place, directory: Path) -> None:
    """Written, read into another slot, and found by the next engine with its size; nobody else may read it."""
    assert place.write(KEY, 0).is_ok
    assert place.read(KEY, 1).is_ok
    assert place.memory[1] == place.memory[0]
    [path] = files(directory)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    place.disk.close()
    again = Place(directory)
    assert again.disk.scan() == [(KEY, again.disk.block_bytes)]
    assert path.stat().st_size == again.disk.block_bytes
    assert again.read(KEY, 2).is_ok
    assert again.memory[2] == place.memory[0]
    again.disk.close()
    place.disk = Place(directory.with_name("other")).disk


def flip(index: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


@pytest.mark.parametrize(
    "damage",
    [flip(0), flip(20), flip(60), flip(200), flip(-1), lambda data: data[:-1], lambda data: data + b"x",
     lambda data: b"", lambda data: data[:80], lambda data: bytes(len(data))],
)  # fmt: skip
def test_damage_anywhere_is_seen(place: Place, directory: Path, damage: Callable[[bytes], bytes]) -> None:
    """A flipped bit in any part, a cut, an addition and zeros make a block unreadable, and its file goes."""
    place.write(KEY, 0)
    [path] = files(directory)
    path.write_bytes(damage(path.read_bytes()))

    assert not place.read(KEY, 1).is_ok
    place.disk.close()
    assert files(directory) == []
    place.disk = Place(directory.with_name("other")).disk


def test_a_block_under_a_wrong_name_is_not_read(place: Place, directory: Path) -> None:
    """A sound file that was renamed to another key is refused; so is a link."""
    place.write(KEY, 0)
    [path] = files(directory)
    name = OTHER.hex()
    (directory / name[:2]).mkdir()
    wrong = directory / name[:2] / f"{name}.kv"
    wrong.write_bytes(path.read_bytes())
    assert not place.read(OTHER, 1).is_ok
    place.write(OTHER, 2)
    wrong.unlink()
    wrong.symlink_to(path)

    assert not place.read(OTHER, 1).is_ok
    assert place.read(KEY, 1).is_ok


def test_what_is_gone_or_never_was_is_a_miss(place: Place, directory: Path) -> None:
    """Reading an unknown or removed key fails, removing one is no error, and a full or vanished disk fails the write
    alone."""
    assert not place.read(KEY, 1).is_ok
    place.disk.remove(KEY)
    place.write(KEY, 0)
    place.disk.remove(KEY)
    assert place.write(OTHER, 0).is_ok
    assert not place.read(KEY, 1).is_ok
    (directory / "ee").write_text("in the way")

    assert not place.write(bytes([0xEE] * 48), 0).is_ok
    assert place.read(OTHER, 3).is_ok


def test_the_directory_is_scanned_by_last_use(place: Place, directory: Path) -> None:
    """Oldest first, a read counts as use; drafts of a crash are deleted, and files whose name has no owner; foreign
    files are left alone and not found."""
    keys = [bytes([index]) * 48 for index in range(3)]
    for index, key in enumerate(keys):
        place.write(key, index)
        os.utime(directory / key.hex()[:2] / f"{key.hex()}.kv", (index, index))
    place.read(keys[0], 3)
    draft = directory / "00" / f"{keys[0].hex()}.draft"
    draft.write_bytes(b"half")
    old = directory / "00" / f"{'00' * 32}.kv"
    old.write_bytes(b"of a version that named no owner")
    foreign = directory / "00" / "note.txt"
    foreign.write_text("mine")

    assert [key for key, _ in place.disk.scan()] == [keys[1], keys[2], keys[0]]
    assert not draft.exists()
    assert not old.exists()
    assert foreign.exists()


def test_its_speed_is_measured(place: Place, directory: Path) -> None:
    """By blocks of its own, of which nothing is left; where that fails it is not known, and that is no error."""
    speed = place.disk.measure(4)
    assert speed is not None
    assert 0 < speed < 1e12
    assert files(directory) == []
    place.disk._directory = directory / "lock"  # no directory

    assert place.disk.measure(1) is None


def test_two_engines_cannot_share_a_directory(place: Place, directory: Path) -> None:
    """The second is refused by name, and the first goes on; a directory that can't be made is refused too."""
    with pytest.raises(ConfigError, match="in use by another engine"):
        Place(directory)
    (directory / "file").write_text("")
    with pytest.raises(ConfigError, match="--kv-disk-dir"):
        Place(directory / "file" / "kv")

    assert place.write(KEY, 0).is_ok
