"""kill -9 of a gateway at every point of an upload: what is there afterwards is whole or not there at all."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.storage import DirectoryStore
from tests.gateway.dying import POINTS
from tests.gateway.live import ADMIN_KEY, serve
from tests.gateway.scripted import chat
from tests.gateway.test_adapters_api import ACME, adapters, parts

__all__ = ["adapters"]
ROOT = Path(__file__).parents[2]
REGISTERED = ("before the epoch moves", "after the registration")


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str, adapters: list[Any], point: str
) -> None:
    """HS-16: a fresh gateway on the same data lists the adapter whole and answers with it, or does not have it and
    takes it; nothing else is listed, no version is half there, stages are swept, stored files are sound."""
    settings = (point, str(tiny_llama), str(tmp_path / "data"), sqlite_url, redis_url)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gateway.dying", *settings, cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    url = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        with pytest.raises(httpx.HTTPError):
            await client.post(ACME, files=parts(adapters[0], "pirate"))
    assert await asyncio.wait_for(child.wait(), 30) == -signal.SIGKILL

    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url) as live:
        admin = await live.http()
        listed = (await admin.get(ACME)).json()["data"]
        assert [row["id"] for row in listed] == (["pirate"] if point in REGISTERED else [])
        assert all(row["status"] == "ready" for row in listed)
        if not listed:
            made = await admin.post(ACME, files=parts(adapters[0], "pirate"))
            assert (made.status_code, made.json()["version"]) == (201, 1)
        caller = await live.http(await live.key("acme"))
        answer = await caller.post("/v1/chat/completions", json=chat() | {"model": "pirate"})
        assert (answer.status_code, answer.headers["x-adapter-version"]) == (200, "1")
        store = DirectoryStore(live.settings.store_dir)
        assert [store.problem(digest) for digest in store.digests()] == [None]
        for stage in (live.settings.store_dir / "stage").iterdir():
            os.utime(stage, (0, 0))  # as if an hour had passed
        store.sweep()
        assert list((live.settings.store_dir / "stage").iterdir()) == []


async def test_files_go_after_their_grace(
    tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str, adapters: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """HS-04: the operator may choose how long files stay that nothing refers to; a short time is warned of at start."""
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, adapter_grace=3.0) as live:
        assert "adapter_grace is 3 s" in caplog.text
        admin = await live.http()
        await admin.post("/admin/v1/tenants", json={"id": "acme"})
        for i, name in enumerate(("stays", "goes")):
            await admin.post(ACME, files=parts(adapters[i], name))
        stored = live.settings.store_dir / "store"
        await admin.delete(f"{ACME}/goes")
        for _ in range(600):
            if len(list(stored.iterdir())) == 1:
                break
            await asyncio.sleep(0.05)
        (left,) = stored.iterdir()
        assert (await admin.get(f"{ACME}/stays")).json()["digest"] == f"sha256:{left.name}"
