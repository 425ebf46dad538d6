"""Multipart bodies of adapters: streamed to fixed names, bounded, hostile ones refused by name."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.config import MAX_CONFIG_BYTES
from adapters.shards import INDEX_FILE, stage_file
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from gateway.errors import to_api_error
from gateway.upload import (
    MAX_BODIES,
    MAX_BODIES_PER_OWNER,
    MAX_WEIGHTS,
    Received,
    UploadError,
    UploadGate,
    UploadTooLarge,
    UploadTooSlow,
    check_length,
    in_time,
    receive,
)

TYPE = "multipart/form-data; boundary=xyz"


def part(name: str, data: bytes, extra: str = "") -> bytes:
    return f'--xyz\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + data + b"\r\n"


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


async def stream(data: bytes, size: int = 1 << 16) -> AsyncIterator[bytes]:
    for i in range(0, len(data), size):
        yield data[i : i + size]


async def upload(
    stage: Path, data: bytes, max_bytes: int = 1000, wants_name: bool = True, size: int = 1 << 16
) -> str | None:
    return (await receive(stream(data, size), TYPE, stage, max_bytes, wants_name)).name


def files(directory: Path) -> list[Path]:
    return list(directory.rglob("*"))


GOOD = [part("name", b"pirate"), part("config", b"{}"), part("weights", b"\r\n--xy\0\xff")]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
async def test_parts_land_in_fixed_files(tmp_path: Path, order: Iterable[int], size: int) -> None:
    """Whatever the order of the parts and the cut of the chunks, bytes arrive unchanged."""
    assert await upload(tmp_path, body(*(GOOD[i] for i in order)), size=size) == "pirate"
    assert (tmp_path / CONFIG_FILE).read_bytes() == b"{}"
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == b"\r\n--xy\0\xff"


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x", "a/../../b", "%2e%2e/", "C:\\x", "..", "é\0"])
async def test_no_file_name_becomes_a_path(tmp_path: Path, name: str) -> None:
    """AU-05: a client's file names are ignored: the stage holds its two files and nothing is written elsewhere."""
    stage = tmp_path / "stage"
    stage.mkdir()

    await upload(stage, body(GOOD[0], part("config", b"{}", f'; filename="{name}"'), GOOD[2]))

    assert {path.name for path in files(tmp_path)} == {"stage", CONFIG_FILE, WEIGHTS_FILE}


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (body(GOOD[0], GOOD[1]), "missing_required_parameter", "weights"),
        (body(GOOD[0], GOOD[2]), "missing_required_parameter", "config"),
        (body(GOOD[1], GOOD[2]), "missing_required_parameter", "name"),
        (body(*GOOD, part("path", b"/etc")), "unknown_parameter", "path"),
        (body(*GOOD, GOOD[1]), "invalid_value", "config"),
        (body(part("name", b"\xff"), GOOD[1], GOOD[2]), "invalid_value", "name"),
        (b"".join(GOOD), "invalid_multipart", None),
        (b"garbage", "invalid_multipart", None),
        (b"", "invalid_multipart", None),
        (body(b"--xyz\r\nX: y\r\n\r\nz\r\n"), "unknown_parameter", None),
        (body(b"--xyz\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\nz\r\n"), "invalid_multipart", None),
    ],
)
async def test_bad_bodies_are_refused_by_name(tmp_path: Path, data: bytes, code: str, param: str | None) -> None:
    """Missing, unknown, doubled and damaged parts each have their code; nothing is guessed."""
    with pytest.raises(UploadError) as caught:
        await upload(tmp_path, data)

    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary="])
async def test_other_content_types_are_refused(tmp_path: Path, kind: str) -> None:
    """A body that is not multipart is refused before it is read."""
    with pytest.raises(UploadError) as caught:
        await receive(stream(b"{}"), kind, tmp_path, 10, True)

    assert caught.value.code == "invalid_content_type"


async def test_shards_are_parts_of_weights(tmp_path: Path) -> None:
    """Several parts `weights` and their index land in files that the server names, in the order in which they came."""
    shards = [part("weights", b"%d" % number, f'; filename="../../{number}"') for number in range(3)]

    await upload(tmp_path, body(*shards[:2], *GOOD[:2], shards[2], part("index", b"{}")), size=7)

    assert [(tmp_path / stage_file(number)).read_bytes() for number in range(3)] == [b"0", b"1", b"2"]
    assert (tmp_path / INDEX_FILE).read_bytes() == b"{}"
    assert len(files(tmp_path)) == 5


@pytest.mark.parametrize(
    ("num_shards", "size", "rest", "param"),
    [(2, 1, [], "index"), (MAX_WEIGHTS + 1, 1, [part("index", b"{}")], "weights"),
     (3, 400, [part("index", b"{}")], "weights"), (2, 1, [part("index", b"{}")] * 2, "index")],
)  # fmt: skip
async def test_shards_have_limits_together(
    tmp_path: Path, num_shards: int, size: int, rest: list[bytes], param: str
) -> None:
    """Shards without an index, too many of them, more bytes than one file might have, two indices: refused by name."""
    with pytest.raises(UploadError) as caught:
        await upload(tmp_path, body(*GOOD[:2], *[part("weights", b"x" * size)] * num_shards, *rest))

    assert caught.value.param == param


async def test_each_part_has_its_limit(tmp_path: Path) -> None:
    """Weights above the limit, a huge config and a huge name are refused while reading, naming the part."""
    for i, (name, size) in enumerate([("weights", 1001), ("config", MAX_CONFIG_BYTES + 1), ("name", 2000)]):
        (stage := tmp_path / str(i)).mkdir()
        with pytest.raises(UploadTooLarge) as caught:
            await upload(stage, body(part(name, b"x" * size)))
        assert caught.value.param == name
        assert sum(file.stat().st_size for file in stage.iterdir()) <= 1000


def test_content_length_is_checked_first() -> None:
    """A body that says it is too large is refused before a byte is read; one that fits is not."""
    check_length({"content-length": "1000"}, 1000)
    check_length({}, 1000)
    with pytest.raises(UploadTooLarge):
        check_length({"content-length": str(10**12)}, 1000)


async def test_memory_does_not_grow_with_the_body(tmp_path: Path) -> None:
    """64 MiB of weights pass through a few MiB of memory."""
    block = b"x" * (1 << 16)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"".join(GOOD[:2]) + part("weights", b"")[:-2]
        for _ in range(1024):
            yield block
        yield b"\r\n--xyz--\r\n"

    tracemalloc.start()
    await receive(chunks(), TYPE, tmp_path, 1 << 30, True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (tmp_path / WEIGHTS_FILE).stat().st_size == 64 << 20
    assert peak < 8 << 20


@given(data=st.binary(max_size=400), size=st.integers(1, 50))
async def test_any_bytes_are_refused_cleanly(tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int) -> None:
    """No body makes anything but an UploadError."""
    stage = tmp_path_factory.mktemp("stage")
    with suppress(UploadError):
        await upload(stage, b"--xyz\r\n" + data, size=size)

    assert {path.name for path in files(stage)} <= {CONFIG_FILE, WEIGHTS_FILE}


@pytest.mark.parametrize(("total_s", "idle_s"), [(60.0, 0.05), (0.2, 60.0)])
async def test_a_slow_body_is_given_up(tmp_path: Path, total_s: float, idle_s: float) -> None:
    """A client that stands still, or trickles for ever, is 408 at its time; a steady one is not."""

    async def trickle() -> AsyncIterator[bytes]:
        yield part("name", b"")[:-2]
        for _ in range(10_000):
            await asyncio.sleep(0.5 if idle_s < 1 else 0.01)
            yield b"x"

    with pytest.raises(UploadTooSlow) as caught:
        await receive(in_time(trickle(), total_s, idle_s), TYPE, tmp_path, 1000, True)
    assert to_api_error(caught.value).status == 408

    (good := tmp_path / "good").mkdir()
    received = await receive(in_time(stream(body(*GOOD), 7), 60.0, 5.0), TYPE, good, 1000, True)
    assert received == Received("pirate")


async def test_so_many_bodies_at_a_time() -> None:
    """One owner's uploads take a part of the places, all together the rest; whoever leaves makes room."""
    gate, inside, leave = UploadGate(), list[str](), asyncio.Event()

    async def take(owner: str) -> None:
        async with gate.body(owner):
            inside.append(owner)
            await leave.wait()

    owners = ["greedy"] * 50 + [f"t{i}" for i in range(50)]
    tasks = [asyncio.create_task(take(owner)) for owner in owners]
    await asyncio.sleep(0.01)
    assert inside.count("greedy") == MAX_BODIES_PER_OWNER
    assert len(inside) == MAX_BODIES

    leave.set()
    await asyncio.gather(*tasks)
    assert sorted(inside) == sorted(owners)
