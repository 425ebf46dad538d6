"""Quantised layers on a disk: the next start has the same bits without calibrating, and no file can do it harm."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.llm import LLM
from engine.model.calibration import Calibration
from engine.model.config import ModelConfig
from engine.model.weight_cache import WeightCache
from engine.model.weights import load_model
from engine.ops.native import NativeOps
from engine.params import SamplingParams
from engine.quantization import Quantization
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence
from tests.tiny import tiny_model

OPS = NativeOps()
KIND = Quantization(4, 32)
ROWS = torch.randint(0, 290, (4, 64), generator=torch.Generator().manual_seed(3))
NO_ROWS = ROWS[:0]  # nothing can be calibrated by them


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", num_layers=2)


def cache_of(tmp_path: Path, fingerprint: str = "ab" * 32, part: str = "text") -> WeightCache:
    return WeightCache(tmp_path / "cache", fingerprint, [part])


def logits(model: Path, calibration: Calibration) -> Tensor:
    config = ModelConfig.from_dir(model)
    loaded = load_model(model, config, OPS, quantization=KIND, calibration=calibration)
    cache = KVCache(config, 2, BLOCK_SIZE, OPS.weight_dtype)
    return forward(loaded, cache, [Part(make_sequence(list(range(20)), [0, 1]), 0, 20)])[0]


def test_the_next_start_calibrates_nothing(model: Path, tmp_path: Path) -> None:
    """It has the same bits, from the file alone, which only its owner reads."""
    first = logits(model, Calibration(ROWS, cache_of(tmp_path)))

    assert torch.equal(logits(model, Calibration(NO_ROWS, cache_of(tmp_path))), first)
    assert cache_of(tmp_path).path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", [4, 60, -100, None], ids=["length", "header", "weights", "cut"])
def test_a_damaged_file_is_made_anew(at: int | None, model: Path, tmp_path: Path) -> None:
    """Wherever a byte is another, or where the file ends early: this start and the next have the right weights."""
    cache = cache_of(tmp_path)
    first = logits(model, Calibration(ROWS, cache))
    data = bytearray(cache.path.read_bytes())
    if at is None:
        del data[len(data) // 2 :]
    else:
        data[at] ^= 0x10
    cache.path.write_bytes(data)

    assert cache.load() is None
    assert torch.equal(logits(model, Calibration(ROWS, cache)), first)
    assert torch.equal(logits(model, Calibration(NO_ROWS, cache)), first)


def test_one_file_for_each_base(tmp_path: Path) -> None:
    """What a base's layers were for another text or version goes when they are made anew; others' stay."""
    known = {"0.data": torch.arange(4, dtype=torch.uint8)}
    old, new, other = cache_of(tmp_path, part="old"), cache_of(tmp_path, part="new"), cache_of(tmp_path, "cd" * 32)
    for each in (old, other, new):
        each.store(known)

    assert [each.load() is not None for each in (old, new, other)] == [False, True, True]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_starts_at_the_same_time(tmp_path: Path) -> None:
    """Whoever reads while others write has a whole file, and nothing else is left when all are done."""
    known = {"0.squares": torch.rand(3), "0.data": torch.randint(0, 255, (200_000,), dtype=torch.uint8)}
    cache_of(tmp_path).store(known)
    writers = [threading.Thread(target=lambda: [cache_of(tmp_path).store(known) for _ in range(10)]) for _ in range(3)]
    for each in writers:
        each.start()

    while any(each.is_alive() for each in writers):
        found = cache_of(tmp_path).load()
        assert found is not None
        assert all(torch.equal(found[name], tensor) for name, tensor in known.items())

    assert list((tmp_path / "cache").iterdir()) == [cache_of(tmp_path).path]


def test_a_directory_that_takes_nothing(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine starts all the same, and says what the next start will cost."""
    (tmp_path / "cache").write_text("not a directory")

    logits(model, Calibration(ROWS, cache_of(tmp_path)))

    assert "calibrates again" in caplog.text


def test_an_engine_has_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies beside the native operations; weights that were exchanged, or another group, make another."""
    directory = tmp_path / ".cache" / "chorus"
    directory.mkdir(parents=True, mode=0o700)
    shutil.copy(OPS._library._name, directory)
    monkeypatch.setenv("HOME", str(tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    names, written = [], []
    for group in (32, 32, 64, 64):
        with LLM(model, quantization="int4", quantization_group=group, max_model_len=64) as llm:
            written.append(llm.generate([5, 6, 7], params)[0].token_ids)
        (file,) = directory.glob("layers-*.safetensors")
        names.append((file.name, file.stat().st_mtime_ns))
        if len(names) == 3:
            os.utime(model / "model.safetensors", ns=(1, 1))

    assert names[0] == names[1]
    assert len({name for name, _ in names}) == 3
    assert written[0] == written[1]
    assert written[2] == written[3]
