"""What strangers send in place of an adapter's weights, over HTTP: refused in a moment, with nothing left behind."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.gateway.live import Live
from tests.gateway.test_adapters_api import ACME, upload
from tests.gateway.test_admin import error

NUM_TINY = 20_000


@pytest.fixture
async def admin(live: Live) -> httpx.AsyncClient:
    client = await live.http()
    await client.post("/admin/v1/tenants", json={"id": "acme"})
    return client


@pytest.fixture
def honest(tiny_lora: Path) -> tuple[bytes, bytes]:
    return (tiny_lora / "adapter_config.json").read_bytes(), (tiny_lora / "adapter_model.safetensors").read_bytes()


def header_of(weights: bytes) -> dict[str, dict[str, object]]:
    return json.loads(weights[8 : 8 + struct.unpack("<Q", weights[:8])[0]])  # type: ignore[no-any-return]


def framed(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def overlapping(weights: bytes) -> bytes:
    """Two tensors share their bytes."""
    header = header_of(weights)
    first, second = list(header)[1:3]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    return framed(header, weights[8 + struct.unpack("<Q", weights[:8])[0] :])


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "pointer": (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n".ljust(130),
                "weights_lfs_pointer"),
    "cut by one byte": (lambda weights: weights[:-1], "weights_truncated"),
    "a hundred bytes more": (lambda weights: weights + bytes(100), "weights_trailing_bytes"),
    "header of 2^63-1": (lambda weights: framed(header_of(weights), length=2**63 - 1), "weights_truncated"),
    "header of 2^64-1": (lambda weights: framed(header_of(weights), length=2**64 - 1), "weights_truncated"),
    "header of 20 MB": (lambda _: struct.pack("<Q", 20 << 20) + b" " * (20 << 20), "header_too_large"),
    "overlapping": (overlapping, "weights_invalid"),
    "empty": (lambda _: b"", "weights_empty"),
    "no tensors": (lambda _: framed({}), "weights_empty"),
    "nested": (lambda _: struct.pack("<Q", 1 << 20) + b"[" * (1 << 20), "weights_invalid"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
async def test_broken_files(live: Live, admin: httpx.AsyncClient, honest: tuple[bytes, bytes], kind: str) -> None:
    """AL-20: each is 422 or 413 with its own code; no file of it stays; the name is free for a good upload after it."""
    make, code = BROKEN[kind]
    before = await asyncio.to_thread(everything, live)

    refused = await upload(admin, (honest[0], make(honest[1])))

    assert (refused.status_code, refused.json()["error"]["code"]) == (413 if "large" in code else 422, code)
    assert await asyncio.to_thread(everything, live) == before
    assert (await upload(admin, honest)).status_code == 201


def everything(live: Live) -> set[Path]:
    """Every file of the store."""
    return set(live.settings.store_dir.rglob("*"))


def zipped(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", kind) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return target.getvalue()


def tarred(*members: tuple[str, bytes, str], mode: str = "w") -> bytes:
    """(name, type, link) each."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:  # type: ignore[call-overload]
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            archive.addfile(info)
    return target.getvalue()


def archives(canary: Path, weights: bytes) -> dict[str, bytes]:
    """AU-06's list. None of them is ever opened, so the bomb needs to be no larger than its first bytes."""
    up = "../" * 20 + str(canary).lstrip("/")
    link = tarfile.SYMTYPE
    return {
        "zip with ..": zipped({up: b"x"}),
        "zip with an absolute path": zipped({str(canary): b"x"}),
        "zip of the adapter": zipped({"adapter_model.safetensors": weights}),
        "zip bomb": zipped({"zeros": bytes(200 << 20)}, zipfile.ZIP_DEFLATED),
        "zip of many files": zipped({str(number): b"" for number in range(NUM_TINY)}),
        "tar with ..": tarred((up, tarfile.REGTYPE, "")),
        "tar with a file through a link": tarred(("a", link, str(canary.parent)), ("a/canary", tarfile.REGTYPE, "")),
        "tar with a hard link": tarred(("a", tarfile.LNKTYPE, "/etc/passwd")),
        "tar with a device": tarred(("a", tarfile.CHRTYPE, "")),
        "tar with one name twice": tarred(("a", tarfile.REGTYPE, ""), ("a", tarfile.REGTYPE, "")),
        "tar.gz": tarred((up, tarfile.REGTYPE, ""), mode="w:gz"),
        "tar.xz": tarred((up, tarfile.REGTYPE, ""), mode="w:xz"),
    }  # fmt: skip


async def test_archives_are_never_opened(
    live: Live, admin: httpx.AsyncClient, honest: tuple[bytes, bytes], tmp_path: Path
) -> None:
    """AU-06: zips and tars, as weights or as config, plain or hostile: 422 in a moment, nothing unpacked anywhere; a
    part of another name is 400."""
    canary = tmp_path / "canary"
    before = await asyncio.to_thread(everything, live)
    for kind, data in archives(canary, honest[1]).items():
        started = time.process_time()
        refused = error(await upload(admin, (honest[0], data)), 422)
        assert refused["code"] == "weights_not_safetensors", kind
        assert time.process_time() - started < 5
        as_config = await upload(admin, (data[: 32 << 10], honest[1]))
        assert error(as_config, 422)["code"] == "config_invalid"
    unknown = await admin.post(ACME, files={"archive": ("adapter.zip", zipped({"a": b""}))})

    assert error(unknown, 400)["code"] == "unknown_parameter"
    assert not canary.exists()
    assert await asyncio.to_thread(everything, live) == before
    assert (await admin.get(ACME)).json()["data"] == []


async def test_a_pickle_is_told_where_to_be_converted(
    live: Live, admin: httpx.AsyncClient, honest: tuple[bytes, bytes]
) -> None:
    """AL-21: adapter_model.bin under any name is refused unopened, and the message says what to do."""
    for data in (zipped({"archive/data.pkl": b"\x80\x02}."}), b"\x80\x02}q\x00." + bytes(50)):
        refused = error(await upload(admin, (honest[0], data)), 422)
        assert refused["code"] == "weights_not_safetensors"
        assert "chorus adapters push" in refused["message"]
