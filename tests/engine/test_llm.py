"""LLM: the engine offline. Prompts, parameters and adapters of every form; outputs; faults that leave it usable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.spec import AdapterError
from chorus import LLM, SamplingParams
from engine.config import ConfigError
from engine.memory_plan import block_bytes
from engine.model.config import ModelConfig
from engine.protocol import Broken, Refused
from tests.tiny import tiny_adapter, tiny_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(tiny_llama, dtype="float32", max_num_seqs=8) as made:
        yield made


def test_prompts_are_texts_or_ids(llm: LLM) -> None:
    """One text, one list of ids, and lists of both give an output each, in order; a text is what its ids are."""
    text = "the quick brown fox"
    ids = tiny_tokenizer().encode(text).ids

    single, listed, mixed = (
        llm.generate(text, GREEDY),
        llm.generate(ids, GREEDY),
        llm.generate([[5], text, ids], GREEDY),
    )

    assert len(single) == len(listed) == 1
    assert single[0].prompt_token_ids == ids
    assert single[0].token_ids == listed[0].token_ids == mixed[1].token_ids == mixed[2].token_ids
    assert mixed[0].prompt_token_ids == [5]
    assert single[0].text == tiny_tokenizer().decode(single[0].token_ids)
    assert single[0].finish_reason == "length"
    assert single[0].logprobs is None


def test_parameters_and_adapters_for_all_or_for_each(llm: LLM, tiny_lora: Path) -> None:
    """A list goes prompt by prompt, a single one to all, None is the base; another length is refused."""
    ref = llm.add_adapter(tiny_lora)
    prompts = ["hello world", "hello world", "hello world"]
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), GREEDY]

    outputs = llm.generate(prompts, params, [None, ref, ref])

    assert [len(output.token_ids) for output in outputs] == [12, 3, 12]
    assert outputs[1].token_ids == outputs[2].token_ids[:3]
    assert outputs[0].token_ids != outputs[2].token_ids
    assert [o.token_ids for o in llm.generate(prompts, GREEDY, ref)] == [outputs[2].token_ids] * 3
    with pytest.raises(ValueError, match="3 prompts but 2 params"):
        llm.generate(prompts, params[:2])
    with pytest.raises(ValueError, match="3 prompts but 1 adapters"):
        llm.generate(prompts, GREEDY, [ref])
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_the_engine_holds(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """A long list is fed bit by bit, keeps its order, and can show how far it is."""
    prompts = [[3 + i % 300] for i in range(100)]

    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), show_progress=True)

    assert [output.prompt_token_ids for output in outputs] == prompts
    assert {len(output.token_ids) for output in outputs} == {2}


def test_chat_follows_the_template(llm: LLM) -> None:
    """A conversation, or a list of them, becomes exactly the ids of the model's chat template."""
    messages = [{"role": "user", "content": "hello"}]
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

    one, two = llm.chat(messages, GREEDY), llm.chat([messages, messages], GREEDY)

    assert one[0].prompt_token_ids == tiny_tokenizer().encode(rendered).ids
    assert [output.token_ids for output in two] == [one[0].token_ids] * 2


def test_stop_strings_end_text_and_ids(llm: LLM) -> None:
    """The text ends before the stop string; the ids end with the token that completed it, and nothing is produced after
    it, also where it begins in one token and ends in another."""
    whole = llm.generate("hello", GREEDY)[0]
    pieces = [tiny_tokenizer().decode([token]) for token in whole.token_ids]
    stop = whole.text[len(pieces[0]) + len(pieces[1]) - 1 :][:2]
    first = whole.text.find(stop)
    needed = next(n for n in range(1, 13) if stop in tiny_tokenizer().decode(whole.token_ids[:n]))

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop], logprobs=1)
    output = llm.generate("hello", params)[0]

    assert output.text == whole.text[:first]
    assert output.token_ids == whole.token_ids[:needed]
    assert (output.finish_reason, output.choices[0].stop_reason) == ("stop", stop)
    assert output.logprobs is not None
    assert len(output.logprobs) == needed
    assert llm.stats.running == 0


def test_stop_token_ids_and_min_tokens(llm: LLM) -> None:
    """A stop id ends the output and is its last id, but not before min_tokens."""
    whole = llm.generate("hello", GREEDY)[0].token_ids
    stop = whole[2]
    early = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    late = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], min_tokens=6)

    first, second = llm.generate(["hello", "hello"], [early, late])

    assert first.token_ids == whole[: whole.index(stop) + 1]
    assert (first.finish_reason, first.choices[0].stop_reason) == ("stop", stop)
    assert len(second.token_ids) >= 6
    assert stop not in second.token_ids[:5]


def test_choices_fork_from_one_prompt(llm: LLM) -> None:
    """n choices share the prompt, differ by their draws, and each is what it is on its own under equal seed."""
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, n=4, seed=7)

    output = llm.generate([[9] * 40], params)[0]
    again = llm.generate([[9] * 40], params)[0]

    assert len({tuple(choice.token_ids) for choice in output.choices}) > 1
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in output.choices]


def test_prompt_logprobs(llm: LLM) -> None:
    """One entry per prompt token but the first, whatever the chunks; the last token's logprob continues the row."""
    prompt = [7, 8, 9, 10, 11]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=3)

    output = llm.generate([prompt], params)[0]
    shorter = llm.generate([prompt[:3]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=3))[0]

    assert output.prompt_logprobs is not None
    assert shorter.logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    assert len(entries) == 4
    assert all(len(entry.top_ids) == 3 for entry in entries)
    assert entries[2].top_ids == shorter.logprobs[0].top_ids
    assert entries[2].top_logprobs == pytest.approx(shorter.logprobs[0].top_logprobs, abs=1e-4)


def test_a_seed_decides_in_any_company(tiny_llama: Path, tiny_lora: Path) -> None:
    """SM-01: a seeded request gives the same tokens alone, beside unseeded and seeded ones, beside adapter rows, and
    when it is preempted."""
    seeded = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=42)
    crowd = [
        SamplingParams(temperature=0.9, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=1),
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    ]
    prompt, others = [9] * 20, [[5] * 30, [6] * 31, [7] * 33]
    kv_memory = 15 * block_bytes(ModelConfig.from_dir(tiny_llama), 16, torch.float32)
    with LLM(tiny_llama, dtype="float32") as roomy, LLM(tiny_llama, dtype="float32", kv_memory=kv_memory) as tight:
        alone = [roomy.generate([prompt], seeded)[0].token_ids for _ in range(3)]
        for llm in (roomy, tight):
            ref = llm.add_adapter(tiny_lora)
            for adapters in ([None] * 4, [ref, None, ref, None]):
                outputs = llm.generate([*others, prompt], [*crowd, seeded], adapters)
                assert outputs[3].token_ids == alone[0]
        assert tight.stats.preemptions_total > 0
    assert alone == [alone[0]] * 3


def test_what_is_refused_leaves_the_engine_usable(llm: LLM) -> None:
    """A prompt too long, empty or outside of the vocabulary fails the whole call by name; the next call works."""
    for prompt, code in ([5] * 3000, "prompt_too_long"), ([], "invalid_request"), ([10**6], "invalid_request"):
        with pytest.raises(Refused) as refusal:
            llm.generate([[5, 6], prompt], GREEDY)
        assert refusal.value.code == code
    assert llm.stats.running == llm.stats.waiting == 0
    assert len(llm.generate("hello", GREEDY)[0].token_ids) == 12


def test_adapters_come_and_go(llm: LLM, tiny_llama: Path, tmp_path: Path) -> None:
    """Equal content is one adapter; an unsound one is refused with its code; a removed one can no longer be used."""
    path = tiny_adapter(tmp_path / "a", tiny_llama, seed=77)
    ref = llm.add_adapter(path)
    llm.generate("hello", GREEDY, ref)
    assert llm.add_adapter(str(path)) == ref

    (tmp_path / "bad").mkdir()
    with pytest.raises(AdapterError) as missing:
        llm.add_adapter(tmp_path / "bad")
    assert missing.value.code == "file_missing"
    too_large = tiny_adapter(tmp_path / "large", tiny_llama, rank=65)
    with pytest.raises(AdapterError) as rank:
        llm.add_adapter(too_large)
    assert rank.value.code == "rank_too_large"

    llm.remove_adapter(ref)
    assert ref.digest not in {state.digest for state in llm.stats.adapters}
    with pytest.raises(Broken) as gone:
        llm.generate("hello", GREEDY, ref)
    assert gone.value.code == "adapter_not_found"
    assert llm.generate("hello", GREEDY, llm.add_adapter(tiny_adapter(tmp_path / "b", tiny_llama, seed=78)))


def test_what_can_not_run_is_a_config_error(tmp_path: Path, tiny_llama: Path) -> None:
    """No checkpoint, and memory that holds nothing, are said before anything is loaded."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="is not a size"):
        LLM(tiny_llama, kv_memory="much")
    with pytest.raises(ConfigError, match="less than one block"):
        LLM(tiny_llama, kv_memory=100)


@pytest.mark.parametrize("rank", [1, 13, 100, 256, 512])
def test_any_rank_that_start_accepts_works(tiny_llama: Path, tmp_path: Path, rank: int) -> None:
    """AL-31: ranks that are no multiple of eight, and those far above the usual limit: an adapter of rank 1 says
    the same when it is filled up with zeros to this rank."""
    small = tiny_adapter(tmp_path / "small", tiny_llama, rank=1, alpha=2, strength=3)
    large = tiny_adapter(tmp_path / "large", tiny_llama, rank=rank, alpha=2 * rank, strength=3)
    tensors = load_file(small / "adapter_model.safetensors")
    filled = {name: torch.zeros_like(tensor) for name, tensor in load_file(large / "adapter_model.safetensors").items()}
    for name, tensor in tensors.items():
        filled[name][: tensor.shape[0], : tensor.shape[1]] = tensor
    save_file(filled, large / "adapter_model.safetensors")
    with LLM(tiny_llama, dtype="float32", max_lora_rank=rank, kv_memory="16MiB") as made:
        refs = [made.add_adapter(small), made.add_adapter(large)]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
        one, other = made.generate([[5, 6, 7]] * 2, params, refs)
        assert one.token_ids == other.token_ids != made.generate([5, 6, 7], params)[0].token_ids
        with pytest.raises(AdapterError, match="at most"):
            made.add_adapter(tiny_adapter(tmp_path / "over", tiny_llama, rank=rank + 1))
