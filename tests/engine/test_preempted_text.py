"""Preemption on the real engine, fp32: whatever was taken from a sequence, and however it came back, its text is that
of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.spec import AdapterRef
from chorus import LLM, SamplingParams
from engine.memory_plan import block_bytes
from engine.model.config import ModelConfig
from engine.outputs import Job, Output
from engine.protocol import Generate
from tests.tiny import tiny_adapter, tiny_tokenizer

PARAMS = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=7, logprobs=0)
LOW, HIGH = list(range(5, 30)), list(range(40, 100))
BACK = {
    "recompute": {"enable_prefix_caching": False},
    "swap": {"kv_host_bytes": 64, "swap": "on"},
    "disk": {"kv_host_bytes": 16, "swap": "on", "kv_disk_dir": ""},
}


def engine(model: Path, directory: Path, short_of: str, back: str) -> LLM:
    """Room for `low` alone: of rows or of blocks; in BACK, sizes are in blocks."""
    block = block_bytes(ModelConfig.from_dir(model), 16, torch.float32)
    options: dict[str, object] = {
        "row": {"max_num_seqs": 1},
        "blocks": {"kv_memory": 6 * block, "max_model_len": 90},
        "adapter": {"max_lora_rank": 8},
        "nothing": {},
    }[short_of] | BACK[back]
    if "kv_host_bytes" in options:
        options["kv_host_bytes"] = int(str(options["kv_host_bytes"])) * block
    if "kv_disk_dir" in options:
        options["kv_disk_dir"] = directory / "kv"
    return LLM(model, dtype="float32", **options)  # type: ignore[arg-type]


def preempt(llm: LLM, low: Generate, num_done: int, other: AdapterRef | None) -> Output:
    """`low` under way until it has produced `num_done` tokens; then a higher class that takes what there is; then more
    prompts, as long as the memory of `low` has not gone. Its answer, and that every request ends."""
    core, job = llm._core, Job(low, llm.tokenizer, starts_text=False)
    tokens: dict[str, list[int]] = {"low": []}

    def step() -> None:
        for event in core.step():
            if event.id == "low" and job.take(event) and not job.is_done:
                core.abort("low", 0)
            tokens.setdefault(event.id, []).extend(getattr(event, "ids", ()))
        core.wait(0.01)

    core.add(low)
    while len(tokens["low"]) < num_done:
        step()
    core.add(Generate(id="high", prompt=HIGH, params=PARAMS, adapter=other, priority=0))
    if core._residency.is_loading:  # `low` might end before its adapter has been read
        assert core._residency.wait(30)
    while core.has_work:
        step()
    assert len(tokens["high"]) == 24
    return job.output


def undisturbed(model: Path, low: Generate, path: Path | None) -> Output:
    with LLM(model, dtype="float32", max_lora_rank=8) as llm:
        return llm.generate([low.prompt], low.params, None if path is None else llm.add_adapter(path))[0]


def assert_equal(got: Output, wanted: Output) -> None:
    """Text and usage are equal, logprobs within 1e-3."""
    assert (got.text, got.token_ids, got.finish_reason) == (wanted.text, wanted.token_ids, wanted.finish_reason)
    assert got.num_cached_tokens == wanted.num_cached_tokens == 0
    assert got.logprobs is not None
    assert wanted.logprobs is not None
    assert [one.logprob for one in got.logprobs] == pytest.approx([one.logprob for one in wanted.logprobs], abs=1e-3)


@pytest.mark.parametrize("num_done", [1, 9, 16, 17])
@pytest.mark.parametrize(
    ("short_of", "back"),
    [("row", "recompute"), ("blocks", "recompute"), ("adapter", "recompute"), ("blocks", "swap"), ("blocks", "disk"),
     ("adapter", "swap")],
)  # fmt: skip
def test_texts_are_those_of_an_undisturbed_run(
    tiny_llama: Path, tmp_path: Path, num_done: int, short_of: str, back: str
) -> None:
    """Paused, or made to give up blocks or adapter, after 1, 9, 16 and 17 tokens by a higher class, and back by
    recomputing, by swap or over the disk: tokens and usage are equal, logprobs within 1e-3."""
    paths = [tiny_adapter(tmp_path / str(index), tiny_llama, rank=8, seed=index) for index in range(2)]
    with engine(tiny_llama, tmp_path, short_of, back) as llm:
        mine, other = map(llm.add_adapter, paths)
        low = Generate(id="low", prompt=LOW, params=PARAMS, adapter=mine, priority=2)
        if short_of == "adapter":
            llm._core._residency.budget_bytes = mine.size_bytes * 2
        answer = preempt(llm, low, num_done, other)
        stats = llm.stats

    assert stats.preemptions[{"row": "pause"}.get(short_of, short_of)] >= 1
    assert_equal(answer, undisturbed(tiny_llama, low, paths[0]))
    how = {"row": {}, "blocks": {"recompute" if back == "recompute" else "swap": 1}, "adapter": {}}[short_of]
    assert {name: stats.resumed[name] for name in how} == how
    if back == "disk":
        assert {tier.tier: tier.stores > 0 for tier in stats.kv_tiers} == {"host": True, "disk": True}


def bytes_of(text: str) -> list[int]:
    """One token per byte of the text."""
    alphabet = {"a": "a", "é": "Ã©"}
    ids = [tiny_tokenizer().token_to_id(letter) for one in text for letter in alphabet[one]]
    assert None not in ids
    return ids


@pytest.mark.parametrize("back", ["recompute", "swap"])
@pytest.mark.parametrize("has_stop", [False, True])
def test_half_a_character_and_half_a_stop_string(tiny_llama: Path, tmp_path: Path, back: str, has_stop: bool) -> None:
    """Preempted when the last token is the first byte of "é", and "a" before it, the beginning of the stop string "aé",
    is held back: the text is whole, or ends before the stop string, and usage counts the tokens until then."""
    letters = bytes_of("aé")
    plain = SamplingParams(
        temperature=2.0, max_tokens=48, ignore_eos=True, seed=6, logprobs=0, allowed_token_ids=letters
    )
    low = Generate(id="low", prompt=LOW, params=plain, priority=2)
    ids = undisturbed(tiny_llama, low, None).token_ids
    places = [index for index in range(len(ids) - 2) if ids[index : index + 3] == letters]
    assert places, "no é after an a: choose another seed"
    if has_stop:
        low = Generate(
            id="low", prompt=LOW, priority=2,
            params=SamplingParams(
                temperature=2.0, max_tokens=48, ignore_eos=True, seed=6, logprobs=0, allowed_token_ids=letters,
                stop="aé",
            ),
        )  # fmt: skip
    wanted = undisturbed(tiny_llama, low, None)
    with engine(tiny_llama, tmp_path, "blocks", back) as llm:
        answer = preempt(llm, low, places[0] + 2, None)
        assert llm.stats.preemptions["blocks"] == 1

    assert_equal(answer, wanted)
    assert wanted.finish_reason == ("stop" if has_stop else "length")
    if has_stop:
        assert len(answer.token_ids) == places[0] + 3
        assert answer.choices[0].stop_reason == "aé"
        assert "aé" not in answer.text


def test_a_restarted_engine_finds_its_disk(tiny_llama: Path, tmp_path: Path) -> None:
    """A prefix that one engine has written comes back in the next, with equal tokens; damaged files are computed again;
    under another dtype, whose blocks lie differently, nothing is found."""
    prompts = [[3 + (index * 41 + position * 7) % 360 for position in range(70)] for index in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)

    def run(dtype: str = "float32") -> tuple[list[Output], int]:
        block = block_bytes(ModelConfig.from_dir(tiny_llama), 16, torch.float32)
        with LLM(
            tiny_llama, dtype=dtype, kv_memory=8 * block, max_model_len=100, kv_host_bytes=40 * block,  # type: ignore[arg-type]
            kv_disk_dir=tmp_path / "kv", swap="on",
        ) as llm:  # fmt: skip
            return [llm.generate([prompt], params)[0] for prompt in prompts], llm.stats.kv_tiers[1].faults

    first, _ = run()
    second, num_faults = run()
    assert num_faults == 0
    assert [one.num_cached_tokens for one in first] == [0] * 6
    assert [one.num_cached_tokens for one in second[:4]] == [64] * 4
    for path in (tmp_path / "kv").rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
    third, num_faults = run()
    assert num_faults > 0
    assert [one.num_cached_tokens for one in third] == [0] * 6
    for one in (*second, *third):
        assert one.token_ids == first[[other.prompt_token_ids for other in first].index(one.prompt_token_ids)].token_ids
    other, _ = run("bfloat16")
    assert [one.num_cached_tokens for one in other] == [0] * 6
