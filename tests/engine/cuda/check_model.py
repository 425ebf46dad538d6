"""A whole tiny model, and a whole engine, over the Triton kernels under Triton's interpreter. Run by test_cuda.py, in a
process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from adapters.loader import load
from bench.gpu.inputs import called_again
from engine.kv_cache import KVCache
from engine.llm import LLM
from engine.lora import LoraBank
from engine.model.base_weights import ModelBase
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops import Ops
from engine.ops.cards import Card
from engine.ops.cuda import CudaOps
from engine.ops.reference import ReferenceOps
from engine.params import SamplingParams
from engine.sampler import Sampler
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence
from tests.tiny import tiny_adapter

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_cuda.py"

CARD = Card(4, programs_each=2, options={})


def logits_of(ops: Ops, model_dir: Path, adapters: dict[str, Path]) -> list[torch.Tensor]:
    """A prompt in two chunks and a decode step, of rows with and without adapters side by side."""
    config = ModelConfig.from_dir(model_dir)
    model = load_model(model_dir, config, ops)
    shape = config.base_shape()
    bank = LoraBank(shape, 1 << 22, ops.adapter_dtype)
    for name, path in adapters.items():
        bank.place(name, load(path, shape, ops.adapter_dtype, 64, base=ModelBase(model)))
    cache = KVCache(config, 64, BLOCK_SIZE, ops.weight_dtype)
    tokens = [[(7 * row + 3 * position) % 300 + 3 for position in range(20)] for row in range(4)]
    names = [None, "a", "b", "a"]
    rows = [make_sequence(tokens[i], [2 * i, 2 * i + 1], names[i]) for i in range(4)]
    found = []
    for start, end in ((0, 11), (11, 19), (19, 20)):
        found += forward(model, cache, [Part(row, start, end) for row in rows], bank)
    return found


def test_a_model_equals_the_reference(tiny_llama: Path, tmp_path: Path) -> None:
    """Logits of prompts in chunks and of decode steps, base rows and adapters of two ranks in one batch, are those of
    plain torch."""
    adapters = {
        "a": tiny_adapter(tmp_path / "a", tiny_llama, seed=1, rank=4),
        "b": tiny_adapter(tmp_path / "b", tiny_llama, seed=2, rank=24, targets=("q_proj", "down_proj")),
    }

    got = logits_of(CudaOps(torch.float32, BLOCK_SIZE, CARD, called_again), tiny_llama, adapters)
    wanted = logits_of(ReferenceOps(torch.float32), tiny_llama, adapters)

    for one, other in zip(got, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_an_engine_gives_the_same_tokens(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """From prompts to texts through scheduler, cache, bank, runner and sampler: the kernels choose the tokens that the
    reference chooses, greedy and drawn, with and without adapters in one batch."""
    adapter = tiny_adapter(tmp_path / "a", tiny_llama, seed=1, rank=4)
    answers = []
    for ops in (CudaOps(torch.float32, BLOCK_SIZE, CARD, called_again), ReferenceOps(torch.float32)):
        monkeypatch.setattr("engine.build.create_ops", lambda *args, ops=ops: ops)
        with LLM(tiny_llama, device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4) as llm:
            name = llm.add_adapter(adapter)
            params = [
                SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
                SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True),
            ]
            outputs = llm.generate(["the quick brown fox", "hello world"], params, adapters=[name, None])
            answers.append([output.token_ids for output in outputs])

    assert answers[0] == answers[1]
    assert all(len(tokens) == 4 for tokens in answers[0])


@pytest.mark.parametrize(("spread", "most"), [(8, 1), (0.1, 5)])
def test_a_step_ends_with_one_copy(spread: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are greedy, drawn and overflown in one step: their tokens come to the host together, and are those of
    the sampler that draws on the host. Only where probabilities are so flat that a draw falls beyond the likeliest
    tokens, there are more copies."""
    copies = 0
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * spread
    logits[4, 7] = torch.nan
    params = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}]
    rows = [make_sequence([5, 6, 7], [], seed=index, **{"temperature": 0.0, **more}) for index, more in
            enumerate([*params, {"temperature": 1.0}])]  # fmt: skip
    wanted = Sampler(()).sample(logits.clone(), rows)
    to_host = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copies
        copies += 1
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    draw = CudaOps(torch.float32, BLOCK_SIZE, CARD, called_again).draw
    got = Sampler((), draw).sample(logits.clone(), rows)

    assert 1 <= copies <= most
    assert [each.token_id for each in got] == [each.token_id for each in wanted]
    assert wanted[4].token_id is None
