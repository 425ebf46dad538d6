"""KV blocks on the disk, with real processes: those of a tenant are gone when it is, or when it is to keep less."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from engine.memory_plan import block_bytes
from engine.model.config import ModelConfig
from gateway.kv_owners import SYNC_S
from tests.e2e.conftest import needs_redis
from tests.e2e.process import ChorusProcess, wait_for

MODEL = "tiny-llama"
BLOCKS = 40
AT_ONCE_S = SYNC_S * 2 / 3
"""Sooner than the look at everything that comes in any case."""


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChorusProcess]:
    """Memory for few blocks, a host pool and a disk."""
    needs_redis()
    data_dir = tmp_path_factory.mktemp("erasure")
    options = {
        "--workers": 2, "--dtype": "float32", "--max-model-len": 512, "--swap": "on", "--kv-disk-dir": data_dir / "kv",
        "--kv-memory": BLOCKS * block_bytes(ModelConfig.from_dir(tiny_llama), 16, torch.float32),
        "--kv-host-bytes": "64MiB", "--kv-disk-bytes": "256MiB",
    }  # fmt: skip
    flags = [str(part) for option in options.items() for part in option]
    with ChorusProcess("serve", str(tiny_llama), *flags, data_dir=data_dir) as running:
        yield running.wait_ready()


def owners(server: ChorusProcess) -> set[str]:
    """Whose blocks lie on the disk: the last 16 bytes of every file's name."""
    return {path.stem[64:] for path in (server.data_dir / "kv").glob("*/*.kv")}


def talk(server: ChorusProcess, key: str, topic: int) -> None:
    """Prompts that together are more than the device holds."""
    headers = {"authorization": f"Bearer {key}"}
    for index in range(8):
        prompt = [3 + (topic * 31 + index * 7 + i) % 200 for i in range(200)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200


def owner_of(server: ChorusProcess, tenant: str, topic: int) -> str:
    """The name under which this tenant's blocks now lie on the disk."""
    before = owners(server)
    talk(server, server.make_key(tenant), topic)
    wait_for(lambda: owners(server) - before)
    [found] = owners(server) - before
    return found


def test_a_tenants_blocks_go_with_it(server: ChorusProcess) -> None:
    """DELETE erases its files at once, and nobody else's; a tenant that is made again under the old id finds nothing of
    the former's."""
    stays, goes = owner_of(server, "stays", 1), owner_of(server, "goes", 2)
    assert server.admin("DELETE", "tenants/goes").status_code == 200
    wait_for(lambda: goes not in owners(server), timeout_s=AT_ONCE_S)
    assert stays in owners(server)

    assert owner_of(server, "goes", 2) != goes


@pytest.mark.parametrize("retention", ["none", 1])
def test_a_shorter_retention_erases_what_lies_there(server: ChorusProcess, retention: object) -> None:
    """What was written under the old one goes at once; with "none" nothing comes any more."""
    tenant = f"shorter-{retention}"
    old = owner_of(server, tenant, 3)
    server.admin("PATCH", f"tenants/{tenant}", json={"retention": retention})
    wait_for(lambda: old not in owners(server), timeout_s=AT_ONCE_S)
    before = owners(server)
    talk(server, server.make_key(tenant), 4)
    for topic in (5, 8):
        talk(server, server.make_key(f"after-{tenant}"), topic)  # these push out what the device held
    num_new = 1 if retention == "none" else 2
    wait_for(lambda: len(owners(server) - before) >= num_new)

    assert len(owners(server) - before) == num_new
    assert old not in owners(server)


def test_an_engine_that_was_away_erases_when_it_is_back(server: ChorusProcess) -> None:
    """Killed before the tenant is deleted: its next life finds the files, is told who there is, and erases them."""
    stays, goes = owner_of(server, "kept", 6), owner_of(server, "lost", 7)
    for pid in server.pids("engine"):
        os.kill(pid, signal.SIGSTOP)
        server.admin("DELETE", "tenants/lost")
        os.kill(pid, signal.SIGKILL)
    assert goes in owners(server)
    wait_for(lambda: goes not in owners(server), timeout_s=SYNC_S + 60)
    assert stays in owners(server)
