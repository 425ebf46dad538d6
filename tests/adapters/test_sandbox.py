"""Validation in a child process: the same answer as in this one, within its limits."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import time
from pathlib import Path

import pytest

from adapters import sandbox
from adapters.spec import AdapterInvalid, AdapterTooLarge, AdapterUnsupported, BaseShape
from adapters.validation import Limits, validate, validate_in_subprocess
from tests.adapters.files import LIMITS, SHAPE, config, pairs, raw, write


def _children() -> set[str]:
    """Processes that this one started and that are still there, dead or alive."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def test_the_child_says_what_the_function_says(tmp_path: Path) -> None:
    """The same spec, and the same errors with class, code and parameter."""
    good = write(tmp_path / "good", pairs(), config(base_model_name_or_path="another"))
    assert await validate_in_subprocess(good, SHAPE, LIMITS) == validate(good, SHAPE, LIMITS)

    for kind, tensors, settings in (
        (AdapterUnsupported, pairs(), config(layer_replication=[[0, 2]])),
        (AdapterTooLarge, pairs(rank=64), config(rank=64)),
        (AdapterInvalid, b"", config()),
    ):
        bad = write(tmp_path / kind.__name__, tensors, settings)
        with pytest.raises(kind) as ours:
            validate(bad, SHAPE, LIMITS)
        with pytest.raises(kind) as theirs:
            await validate_in_subprocess(bad, SHAPE, LIMITS)
        assert vars(ours.value) == vars(theirs.value)


async def test_an_endless_pattern_ends(tmp_path: Path) -> None:
    """A pattern of exponential time is stopped by the CPU limit; the caller goes on meanwhile."""
    directory = write(tmp_path, pairs(), config("(?:.+)+Z"))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.02)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(AdapterInvalid) as caught:
        await validate_in_subprocess(directory, SHAPE, dataclasses.replace(LIMITS, cpu_s=1))
    ticking.cancel()

    assert caught.value.code == "validation_limits"
    assert ticks > 5


async def test_config_and_header_have_little_time(tmp_path: Path) -> None:
    """A pattern of exponential time is stopped after seconds, though values might be read for a minute."""
    directory = write(tmp_path, pairs(), config("(?:.+)+Z"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

    with pytest.raises(AdapterInvalid) as caught:
        await validate_in_subprocess(directory, SHAPE, LIMITS)

    assert LIMITS.cpu_s == 60
    assert caught.value.code == "validation_limits"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2 * sandbox.INSPECT_CPU_S


async def test_memory_is_bounded(tmp_path: Path) -> None:
    """AL-20: what would need more memory than is allowed ends in an error of the adapter, not of the machine."""
    directory = write(tmp_path, raw(b"[" + b"[]," * 1_300_000), config())

    with pytest.raises(AdapterInvalid) as caught:
        await validate_in_subprocess(directory, SHAPE, dataclasses.replace(LIMITS, memory_bytes=140 << 20))

    assert caught.value.code in ("validation_limits", "weights_invalid")


async def test_wall_time_is_bounded_and_the_child_is_gone(tmp_path: Path) -> None:
    """A child that does not answer is killed and reaped; so is one whose caller is cancelled."""
    directory = write(tmp_path, pairs(), config("(?:.+)+Z"))
    before = _children()
    with pytest.raises(AdapterInvalid, match="longer than"):
        await sandbox.run(directory, SHAPE, dataclasses.replace(LIMITS, timeout_s=0.5))
    waiting = asyncio.create_task(sandbox.run(directory, SHAPE, LIMITS))
    await asyncio.sleep(0.3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert _children() == before


async def test_the_child_sees_no_environment_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets in the gateway's environment are not handed to the process that reads strangers' files."""
    monkeypatch.setenv("CHORUS_ADMIN_KEY", "secret")
    probe = tmp_path / "probe"
    probe.write_text(f"#!/bin/sh\nenv > {probe}.env\ncat > /dev/null\nexit 1\n")
    probe.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(probe))

    with pytest.raises(RuntimeError, match="broke"):
        await sandbox.run(tmp_path, SHAPE, LIMITS)
    seen = await asyncio.to_thread(Path(f"{probe}.env").read_text)
    assert "secret" not in seen


async def test_an_ordinary_adapter_is_checked_quickly(tmp_path: Path) -> None:
    """32 layers, all linears, rank 16: the check costs little more than starting the child does."""
    shape = BaseShape(num_layers=32, vocab_size=384, hidden_size=64, linears=SHAPE.linears)
    small = write(tmp_path / "small", pairs(["q_proj"]), config(("q_proj",)))
    large = write(tmp_path / "large", pairs(layers=range(32), rank=16), config(rank=16))
    times = []
    for directory, base in ((small, SHAPE), (large, shape)):
        started = time.monotonic()
        await validate_in_subprocess(directory, base, Limits())
        times.append(time.monotonic() - started)

    assert times[1] < 3 * times[0] + 1.0


def test_relative_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory means the same to the child."""
    write(tmp_path / "here", pairs(), config())
    monkeypatch.chdir(tmp_path)

    assert asyncio.run(validate_in_subprocess(Path("here"), SHAPE, LIMITS)).rank == 4
