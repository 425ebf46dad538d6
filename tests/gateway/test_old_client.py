"""The wire as an old client sees it: openai 1.x, installed for this test into a directory of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import IS_CI, ROOT
from tests.gateway.live import Live

OLD = ROOT / "data" / "clients" / "openai-1.109.1"
SCRIPT = Path(__file__).with_name("old_client.py")


@pytest.fixture(scope="session")
def old_client() -> Path:
    """The directory that has openai 1.x; installed once, kept."""
    if not (OLD / "openai").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(OLD), "openai==1.109.1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            message = f"openai 1.x can't be installed: {done.stderr.strip().splitlines()[-1:]}"
            pytest.fail(message) if IS_CI else pytest.skip(message)
    return OLD


async def test_openai_1(live: Live, old_client: Path) -> None:
    """Chats, streams, completions, responses, models and typed errors, with the last 1.x of the openai client."""
    key = await live.key("acme")
    environment = {"PYTHONPATH": str(old_client), "PATH": "/usr/bin:/bin"}

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", str(SCRIPT), f"{live.url}/v1", key, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)

    assert process.returncode == 0, output.decode()
    assert b"all well" in output
