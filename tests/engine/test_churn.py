"""Adapters that come and go: nothing of them stays."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from adapters.spec import AdapterRef
from adapters.storage import DirectoryStore
from chorus import LLM, SamplingParams
from engine.build import build_core
from engine.config import EngineConfig
from tests.tiny import tiny_adapter

PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
WARM_UP, CYCLES = 20, 50


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hs04_upload_call_delete_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """HS-04: 50 times a new adapter of rank 64, a call, its deletion, after a warm-up of 20: memory within 2 %, no
    extent, no entry in the cache and no stored file is left."""
    with LLM(tiny_llama, dtype="float32", max_num_seqs=2, max_lora_rank=64, adapter_memory="16MiB") as llm:
        residency = llm._core._residency
        before = 0
        for index in range(WARM_UP + CYCLES):
            if index == WARM_UP:
                before = resident_bytes()
            path = tiny_adapter(tmp_path / str(index), tiny_llama, rank=64, seed=index)
            ref = llm.add_adapter(path)
            llm.generate("hello", PARAMS, ref)
            assert llm._store.path(ref.digest).is_dir()
            llm.remove_adapter(ref)

        assert resident_bytes() <= 1.02 * before
        assert residency.used_bytes == residency.host_bytes == residency._bank.used_bytes == 0  # type: ignore[attr-defined]
        assert not residency._entries
        assert residency.num_loads == WARM_UP + CYCLES
        assert llm._store.digests() == []
        assert not list((llm._store.root / "stage").iterdir())


def test_start_up_looks_at_no_stored_adapter(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are stored, an engine's start asks the store for none of them, nor for their list; then it reads the
    one that is wanted."""
    store, digests, asked = DirectoryStore(tmp_path), [], list[str]()
    for seed in range(8):
        stage = store.stage()
        tiny_adapter(stage, tiny_llama, seed=seed)
        digests.append(store.commit(stage))
    path = DirectoryStore.path

    def counted(store: DirectoryStore, digest: str) -> Path:
        asked.append(digest)
        return path(store, digest)

    monkeypatch.setattr(DirectoryStore, "path", counted)
    monkeypatch.setattr(DirectoryStore, "digests", lambda _: asked.append("all"))
    options: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 1 << 20, "max_lora_rank": 8, "max_model_len": 256}
    core, _ = build_core(EngineConfig(model=tiny_llama, store_dir=tmp_path, **options))
    assert asked == []

    core.warm(AdapterRef(digests[3], 4, 1 << 10))
    deadline = time.monotonic() + 60
    while not core.stats("").adapter_loads_total:
        assert time.monotonic() < deadline
        core.step()
        core.wait(0.01)
    core.close()
    assert set(asked) == {digests[3]}
