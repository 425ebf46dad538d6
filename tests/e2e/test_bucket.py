"""Two gateways and two engines, each with a disk of its own, on one bucket of a real S3 API: kill -9 and damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from adapters.bucket import Bucket, BucketConfig
from adapters.storage import DAMAGED, WEIGHTS_FILE
from engine.client import make_engine_key
from tests.e2e.callers import Oracle, caller, say, until, upload
from tests.e2e.process import ChorusProcess
from tests.services import free_ports
from tests.tiny import tiny_adapter

PROMPT = [5, 6, 7, 8]


class Site:
    """All machines of the site, by name. `start` may be told again for one that was killed."""

    def __init__(self, model: Path, root: Path, environ: dict[str, str]) -> None:
        self._model = model
        self._root = root
        self._stack = ExitStack()
        ports = dict(zip(("engine-1", "engine-2"), free_ports(2), strict=True))
        self._environ = environ | {
            "CHORUS_ENGINE_KEY": make_engine_key(),
            "CHORUS_ADMIN_KEY": "an-admin-key-for-tests",
            "CHORUS_PEPPER": "a-pepper-for-tests",
            "CHORUS_DTYPE": "float32",
            "CHORUS_DATABASE_URL": f"sqlite+aiosqlite:///{root}/shared.db",
        }
        self._endpoints = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}

    def start(self, name: str) -> ChorusProcess:
        kind = name.partition("-")[0]
        endpoints = self._endpoints.get(name) or ",".join(self._endpoints.values())
        environ = self._environ | {"CHORUS_ENGINE_ENDPOINTS": endpoints}
        made = ChorusProcess(kind, str(self._model), data_dir=self._root / name, **environ)
        return self._stack.enter_context(made)

    def cached(self, name: str, digest: str) -> Path:
        return self._root / name / "adapters" / "cache" / digest / WEIGHTS_FILE

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def site(tiny_llama: Path, tmp_path: Path, redis_url: str, bucket: BucketConfig) -> Iterator[Site]:
    environ = {"CHORUS_REDIS_URL": redis_url, "CHORUS_ADAPTER_STORE": bucket.url, **bucket.options}
    made = Site(tiny_llama, tmp_path, environ)
    yield made
    made.close()


@pytest.mark.long
async def test_machines_share_a_bucket_and_nothing_else(
    site: Site, tiny_llama: Path, tmp_path: Path, oracle: Oracle, bucket: BucketConfig
) -> None:
    """HS-16: what one gateway takes in, both serve, with the words of the offline engine. After kill -9 of all four and
    damage on one engine's disk and loss of the other's, everything is there again. What is damaged in the bucket itself
    is failed, with its reason, and harms nobody; uploading it again mends it."""
    voice, other = (tiny_adapter(tmp_path / name, tiny_llama, seed=seed) for name, seed in (("v", 3), ("o", 4)))
    engines = [site.start("engine-1"), site.start("engine-2")]
    first, second = (site.start(name).wait_ready() for name in ("gateway-1", "gateway-2"))
    key = first.make_key("acme")
    made = await upload(first, "acme", "voice", voice)
    doomed = (await upload(first, "acme", "other", other)).json()["digest"]
    digest = made.json()["digest"].removeprefix("sha256:")

    shown = second.admin("GET", "tenants/acme/adapters/voice").json()
    assert (shown["status"], shown["digest"]) == ("ready", made.json()["digest"])
    assert shown["scales"]
    for gateway in (first, second):
        async with caller(gateway, key, max_retries=5) as client:
            assert (await say(client, "voice", PROMPT, 12)).choices[0].text == oracle(PROMPT, 12, voice)
    assert first.admin("POST", "tenants/acme/adapters/voice/pin").is_success
    for name in ("engine-1", "engine-2"):
        await until(site.cached(name, digest).is_file)

    for machine in (*engines, first, second):
        machine.process.kill()
        machine.wait_end()
    path = site.cached("engine-1", digest)
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\x7f")
    shutil.rmtree(tmp_path / "engine-2" / "adapters")
    engines = [site.start("engine-1"), site.start("engine-2")]
    second = site.start("gateway-2").wait_ready()
    async with caller(second, key, max_retries=5) as client:
        assert (await say(client, "voice", PROMPT, 12)).choices[0].text == oracle(PROMPT, 12, voice)
    await until(site.cached("engine-2", digest).is_file)
    await until(lambda: "damaged in the cache" in engines[0].output)
    break_in_bucket(bucket, doomed)
    await fail_and_mend(site, second, key, (other, doomed))
    async with caller(second, key, max_retries=5) as client:
        assert (await say(client, "other", PROMPT, 12)).choices[0].text == oracle(PROMPT, 12, other)
        assert (await say(client, "voice", PROMPT, 12)).choices[0].text == oracle(PROMPT, 12, voice)


def break_in_bucket(bucket: BucketConfig, digest: str) -> None:
    objects = Bucket(bucket)
    found = objects.list(digest.removeprefix("sha256:"))
    (weights,) = (one for one in found if one.key.endswith(WEIGHTS_FILE))
    objects.put(weights.key, b"garbage" * 1000)


async def fail_and_mend(site: Site, gateway: ChorusProcess, key: str, broken: tuple[Path, str]) -> None:
    """The adapter "other" is garbage in the bucket, and on no engine's disk."""
    directory, digest = broken
    for name in ("engine-1", "engine-2"):
        shutil.rmtree(site.cached(name, digest.removeprefix("sha256:")).parent, ignore_errors=True)
    found = gateway.admin("GET", "tenants/acme/adapters/other").json()
    assert (found["status"], found["reason"]) == ("failed", DAMAGED)
    async with caller(gateway, key) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await say(client, "other", PROMPT, 12)
        assert caught.value.code == "adapter_invalid"
        assert (await say(client, "voice", PROMPT, 4)).choices[0].text

    again = await upload(gateway, "acme", "mended", directory)
    assert again.json()["digest"] == digest
    assert gateway.admin("GET", "tenants/acme/adapters/other").json()["status"] == "ready"
