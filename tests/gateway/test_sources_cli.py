"""`chorus sources` against a gateway that looks by itself only once an hour."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import clean_environment
from tests.gateway.live import ADMIN_KEY, Live, serve
from tests.gateway.test_admin import error
from tests.tiny import tiny_adapter

HOUR_S = 3600


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source" / "acme").mkdir(parents=True)
    return tmp_path / "source"


@pytest.fixture
async def live(tiny_llama: Path, tmp_path: Path, sqlite_url: str, redis_url: str, source: Path) -> AsyncIterator[Live]:
    watched = {"adapter_sources": (str(source), str(tmp_path / "nowhere")), "source_every_s": HOUR_S}
    async with serve(tiny_llama, tmp_path / "data", sqlite_url, redis_url, **watched) as running:
        await (await running.http()).post("/admin/v1/tenants", json={"id": "acme"})
        yield running


async def chorus(live: Live, *arguments: str) -> tuple[int, Any]:
    """→ exit status, and the answer: JSON, or what was said of a fault."""
    environ = clean_environment({"CHORUS_URL": live.url, "CHORUS_ADMIN_KEY": ADMIN_KEY})
    command = [sys.executable, "-m", "gateway.cli", "sources", *arguments, "--json"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=environ, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


async def test_sync_takes_what_is_new(live: Live, source: Path, tmp_path: Path, tiny_llama: Path) -> None:
    """One command, though an adapter must stand still for two looks: when it returns, what is good is ready and what is
    bad is told of, a change too; by place or by id."""
    tiny_adapter(source / "acme" / "good", tiny_llama, seed=1, targets=("q_proj",))
    (source / "acme" / "bad").mkdir()
    status, found = await chorus(live, "sync", str(source))
    assert (status, found["status"], found["ready"], found["failed"], found["waiting"]) == (0, "ok", 1, 1, 0)
    status, rows = await chorus(live, "show", found["id"])
    assert {row["id"]: (row["status"], row["code"]) for row in rows} == {
        "acme/good": ("ready", None), "acme/bad": ("failed", "file_missing")
    }  # fmt: skip
    assert [row["id"] for row in (await chorus(live, "show", str(source), "--failed"))[1]] == ["acme/bad"]

    tiny_adapter(source / "acme" / "bad", tiny_llama, seed=2, targets=("q_proj",))
    assert (await chorus(live, "sync", found["id"]))[1]["ready"] == 2


async def test_what_cant_be_synced_is_told(live: Live, tmp_path: Path) -> None:
    """A source that isn't there is exit status 1 with the reason, as is one that nobody watches."""
    status, found = await chorus(live, "sync", str(tmp_path / "nowhere"))
    assert (status, found["status"]) == (1, "failed")
    assert "nowhere" in found["error"]
    rows = (await chorus(live, "ls"))[1]
    assert [(row["place"].rsplit("/", 1)[1], row["status"]) for row in rows] == [
        ("source", "ok"),
        ("nowhere", "failed"),
    ]
    for command in ("sync", "show"):
        status, said = await chorus(live, command, "other")
        assert (status, said["error"]["code"]) == (1, "source_not_found")


async def test_only_admins_may_ask(live: Live) -> None:
    """A tenant's key, and an unknown source."""
    tenant = await live.http(await live.key("acme", "adapters:write"))
    admin = await live.http()
    (one, _) = (await admin.get("/admin/v1/sources")).json()["data"]
    assert (await tenant.post(f"/admin/v1/sources/{one['id']}/sync")).status_code in (401, 403, 404)
    assert error(await admin.post("/admin/v1/sources/nope/sync"), 404)["code"] == "source_not_found"
