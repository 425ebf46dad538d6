"""The wire as an old client sees it: openai 1.x, installed for this test into a directory of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from engine.protocol import Refused
from tests.conftest import IS_CI, ROOT
from tests.gateway.live import Live
from tests.gateway.scripted import Script

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


async def run(old_client: Path, *arguments: str) -> tuple[bytes, int | None]:
    """Python with openai 1.x and nothing of ours. → its output and status."""
    environment = {"PYTHONPATH": str(old_client), "PATH": "/usr/bin:/bin"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", *arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return output, process.returncode


COUNTING = """
import sys, httpx, openai
calls = []
http = httpx.Client(event_hooks={"request": [calls.append]})
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=2, http_client=http)
try:
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
except openai.InternalServerError as error:
    print(len(calls), error.response.headers["retry-after"])
"""


@pytest.mark.parametrize(("wait_s", "expected"), [(0.02, b"3 1"), (90.0, b"1 90"), (300.0, b"1 300")])
async def test_a_long_wait(live: Live, old_client: Path, wait_s: float, expected: bytes) -> None:
    """T25: openai 1.x takes a Retry-After above a minute for none and would come again at once: it is told not to."""
    Script(error=Refused("queue_full", "full", wait_s)).install(live)
    output, status = await run(old_client, "-c", COUNTING, f"{live.url}/v1", await live.key("acme"))
    assert (output.strip(), status) == (expected, 0)


async def test_openai_1(live: Live, old_client: Path) -> None:
    """Chats, streams, completions, responses, models and typed errors, with the last 1.x of the openai client."""
    key = await live.key("acme")
    output, status = await run(old_client, str(SCRIPT), f"{live.url}/v1", key)
    assert status == 0, output.decode()
    assert b"all well" in output
