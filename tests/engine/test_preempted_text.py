"""Preemption on the real engine, fp32: whatever was taken from a sequence, its text is that of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chorus import LLM, SamplingParams
from engine.core import EngineCore
from engine.memory_plan import block_bytes
from engine.model.config import ModelConfig
from engine.protocol import Chunk, Generate
from tests.tiny import tiny_adapter

PARAMS = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=7, logprobs=0)


def collect(core: EngineCore, tokens: dict[str, list[int]], logprobs: dict[str, list[float]]) -> None:
    for chunk in core.step():
        assert isinstance(chunk, Chunk), chunk
        tokens.setdefault(chunk.id, []).extend(chunk.ids)
        logprobs.setdefault(chunk.id, []).extend(one.logprob for one in chunk.logprobs or ())


@pytest.mark.parametrize("num_done", [1, 9, 16, 17])
@pytest.mark.parametrize("short_of", ["row", "blocks", "adapter"])
def test_texts_are_those_of_an_undisturbed_run(tiny_llama: Path, tmp_path: Path, num_done: int, short_of: str) -> None:
    """Paused, or made to give up blocks or adapter, after 1, 9, 16 and 17 tokens by a higher class: tokens are equal,
    logprobs within 1e-3."""
    one_block = block_bytes(ModelConfig.from_dir(tiny_llama), 16, torch.float32)
    paths = [tiny_adapter(tmp_path / str(index), tiny_llama, rank=8, seed=index) for index in range(2)]
    options = {
        "row": {"max_num_seqs": 1},
        "blocks": {"kv_memory": 6 * one_block, "max_model_len": 90},
        "adapter": {"max_lora_rank": 8},
    }[short_of]
    with LLM(tiny_llama, dtype="float32", enable_prefix_caching=False, **options) as llm:  # type: ignore[arg-type]
        core, (mine, other) = llm._core, map(llm.add_adapter, paths)
        if short_of == "adapter":
            core._residency.budget_bytes = mine.size_bytes * 2
        low = Generate(id="low", prompt=list(range(5, 30)), params=PARAMS, adapter=mine, priority=2)
        [alone] = llm.generate([low.prompt], PARAMS, mine)
        core.evict(mine.digest)
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        core.add(low)
        while len(tokens.get("low", ())) < num_done:
            collect(core, tokens, logprobs)
            core.wait(0.01)
        core.add(Generate(id="high", prompt=list(range(40, 100)), params=PARAMS, adapter=other, priority=0))
        while core.has_work:
            collect(core, tokens, logprobs)
            core.wait(0.01)
        preemptions = core.stats("").preemptions

    assert preemptions[{"row": "pause"}.get(short_of, short_of)] >= 1
    assert len(tokens["high"]) == 24
    assert tokens["low"] == alone.token_ids
    assert alone.logprobs is not None
    assert logprobs["low"] == pytest.approx([one.logprob for one in alone.logprobs], abs=1e-3)
