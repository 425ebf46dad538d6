"""Adapters that change more than linears: from upload to text, in an arena that moves, beside a thread that loads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.spec import AdapterRef, AdapterUnsupported
from adapters.storage import WEIGHTS_FILE
from chorus import LLM, SamplingParams
from engine.batch import build_batch
from engine.lora import LoraBank
from engine.model.overrides import Overrides
from engine.ops.cpu import CpuOps
from engine.ops.native import NativeOps
from tests.engine.forward import BLOCK_SIZE, Part, make_sequence, step_of
from tests.engine.peft_cases import ALL, DORA, NORMS, QV, TABLES, Case, make_adapter, make_base
from tests.engine.test_peft_matrix import Engine
from tests.oracle import Oracle

KINDS = {
    "plain": Case("untied", ALL),
    "dora": Case("untied", ALL | DORA),
    "tables": Case("untied", TABLES | DORA),
    "whole": Case("untied", QV | {"modules_to_save": ["lm_head", "embed_tokens", *NORMS]}),
    "tokens": Case("untied", QV | {"trainable_token_indices": {"embed_tokens": [9, 4], "lm_head": [1, 70]}}),
    "bias": Case("untied", QV | {"lora_bias": True}),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("overrides")
    base = make_base(root / "base", "untied")
    return {"base": base} | {name: make_adapter(root / name, base, case) for name, case in KINDS.items()}


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*")
def test_from_adapter_files_to_text(tiny_llama: Path, tmp_path: Path) -> None:
    """AL-08, AL-10: through store, threads, scheduler, prefix cache and sampler, in one mixed batch: the greedy text of
    each adapter is peft's, prompt logprobs are those of the adapter's own head, and base rows are the base's."""
    paths = {name: make_adapter(tmp_path / name, tiny_llama, case) for name, case in KINDS.items()}
    prompts = [[7 + i, *range(20, 60), 3 * i + 1] for i in range(2 * len(KINDS) + 2)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(tiny_llama), dtype="float32", max_model_len=256, max_batched_tokens=64) as llm:
        refs: dict[str | None, AdapterRef | None] = {name: llm.add_adapter(path) for name, path in paths.items()}
        names = [None, *KINDS] * 2

        outputs = llm.generate(prompts, params, [refs.get(name) for name in names])

    for name in {*names}:
        oracle = Oracle(tiny_llama, {} if name is None else {name: paths[name]})
        for prompt, output, used in zip(prompts, outputs, names, strict=True):
            if used == name:
                oracle.assert_greedy(prompt, output.token_ids, name, str(name))
                logits = oracle.logits(prompt, name)[:-1].log_softmax(-1)
                wanted = logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
                got = [entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]
                assert torch.allclose(torch.tensor(got), wanted, atol=1e-3)


def test_an_adapter_of_a_changed_base_is_not_taken_in(tiny_llama: Path, tmp_path: Path) -> None:
    """What PEFT saved of its base is compared with ours: refused by name where one number differs."""
    path = make_adapter(tmp_path / "a", tiny_llama, KINDS["tables"])
    with LLM(str(tiny_llama), dtype="float32", max_model_len=128) as llm:
        llm.add_adapter(path)
        tensors = load_file(path / WEIGHTS_FILE)
        tensors["base_model.model.lm_head.base_layer.weight"][5, 5] += 1
        save_file(tensors, path / WEIGHTS_FILE)

        with pytest.raises(AdapterUnsupported, match=r"lm_head\.base_layer\.weight"):
            llm.add_adapter(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_an_arena_that_moves_everything_stays(adapters: dict[str, Path], dtype: str) -> None:
    """Extents that were compacted give the same bits as buffers that never moved, vectors and ids included."""
    engine = Engine(adapters["base"], NativeOps() if dtype == "bfloat16" else CpuOps(torch.float32))
    hosts = {name: engine.load(adapters[name]) for name in KINDS}
    for name, host in hosts.items():
        engine.bank.place(name, host)
    wanted = engine.logits([None, *KINDS])
    total = sum(host.size_bytes for host in hosts.values())
    filler = hosts["whole"]
    engine.bank = LoraBank(
        engine.config.base_shape(), total + filler.size_bytes, engine.ops.adapter_dtype, has_arena=True
    )
    for name, host in hosts.items():
        engine.bank.place(name, host)
        if name == "dora":
            engine.bank.place("gone", filler)
    engine.bank.evict("gone")
    engine.bank.evict("plain")
    engine.bank.place("late", filler)
    engine.bank.evict("late")
    engine.bank.place("plain", hosts["plain"])

    got = engine.logits([None, *KINDS])

    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_plain_batches_have_no_overrides(adapters: dict[str, Path]) -> None:
    """Free when unused: linears alone, DoRA or not, leave nothing to do outside ops.lora."""
    engine = Engine(adapters["base"], NativeOps())
    for name in KINDS:
        engine.bank.place(name, engine.load(adapters[name]))

    def has_any(*names: str | None) -> bool:
        parts = [Part(make_sequence([1, 2], [i], name), 0, 2) for i, name in enumerate(names)]
        batch = build_batch(step_of(parts), engine.bank, BLOCK_SIZE)
        return bool(Overrides(batch, engine.ops, 1e-5, engine.config.vocab_size))

    assert not has_any(None)
    assert not has_any(None, "plain", "dora", "bias")
    assert has_any(None, "plain", "tokens")


def test_native_operations_of_two_threads_do_not_meet() -> None:
    """A thread that computes an adapter's norms while the engine steps changes no bit of either's results."""
    ops = NativeOps()
    ops.set_threads(2)
    weight = torch.randn(640, 256)
    packed = ops.pack_linear(weight)
    inputs = [torch.randn(rows, 256) for rows in (1, 3, 16, 40)]
    wanted = [ops.linear(x, packed) for x in inputs]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(150):
            for x, y in zip(inputs, wanted, strict=True):
                if not torch.equal(ops.linear(x, packed), y):
                    wrong.append(len(x))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ops.set_threads(torch.get_num_threads())

    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
