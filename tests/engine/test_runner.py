"""ModelRunner: one Sampled per row of a step, in the step's order, whatever the order of the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.loader import load
from adapters.spec import AdapterRef
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.model.weights import load_model
from engine.ops.reference import ReferenceOps
from engine.params import SamplingParams
from engine.runner import LOGIT_ROWS, ModelRunner
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.step import Row, Step
from tests.oracle import Oracle

BLOCK = 16


class Machine:
    """A runner over a tiny model, its cache, and the model run by transformers."""

    def __init__(self, model: Path, lora: Path) -> None:
        config = ModelConfig.from_dir(model)
        self.cache = KVCache(config, 32, BLOCK, torch.float32)
        bank = LoraBank(config.base_shape(), 1 << 20, torch.float32)
        bank.place("lora", load(lora, config.base_shape(), torch.float32, 64))
        transformer = load_model(model, config, ReferenceOps(torch.float32))
        self.runner = ModelRunner(transformer, self.cache, bank, Sampler(config.eos_token_ids), "cpu")
        self.oracle = Oracle(model, {"lora": lora})


@pytest.fixture(scope="module")
def machine(tiny_llama: Path, tiny_lora: Path) -> Machine:
    return Machine(tiny_llama, tiny_lora)


def sequence(tokens: list[int], blocks: list[int], adapter: str | None = None, **params: int) -> Sequence:
    ref = AdapterRef(adapter) if adapter else None
    chosen = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
    return Sequence("r", 0, tokens, len(tokens), chosen, 0, adapter=ref, blocks=blocks)


def whole(one: Sequence) -> Row:
    return Row(one, 0, one.num_tokens, True)


def test_results_come_in_the_order_of_the_rows(machine: Machine) -> None:
    """A batch is laid out by adapter; its results are in the order in which the rows were asked for, and a row that
    does not reach its end has none."""
    mixed = [
        sequence([5, 6, 7, 8], [0], "lora"),
        sequence([9, 10, 11], [1]),
        sequence([12] * 20, [2, 3]),
        sequence([13, 14], [4], "lora"),
    ]
    rows = (whole(mixed[0]), whole(mixed[1]), Row(mixed[2], 0, 10, False), whole(mixed[3]))

    sampled = machine.runner.run(Step(rows))

    assert sampled[2].token_id is None
    for one, result in zip(mixed, sampled, strict=True):
        if result.token_id is not None:
            machine.oracle.assert_greedy(one.tokens, [result.token_id], one.adapter.digest if one.adapter else None)


def test_a_chunk_goes_on_from_what_lies_in_the_cache(machine: Machine) -> None:
    """Three steps over one prompt give the token that one step over it gives; copied blocks are read like their
    sources."""
    tokens = [3 + i for i in range(40)]
    one = sequence(tokens, [5, 6, 7])
    for start, count in ((0, 7), (7, 20)):
        assert machine.runner.run(Step((Row(one, start, count, False),)))[0].token_id is None
    copy = sequence(tokens, [5, 8, 7])

    result = machine.runner.run(Step((Row(copy, 27, 13, True),), copies=((6, 8),)))[0]

    assert result.token_id is not None
    machine.oracle.assert_greedy(tokens, [result.token_id], None)


@pytest.mark.parametrize("cut", [1, 50, 99, 100])
def test_prompt_logprobs_of_each_chunk(machine: Machine, cut: int) -> None:
    """Entry j of a chunk is that of prompt token start + j + 1; the prompt's last position has none, it chooses. More
    rows than are held at once make no difference."""
    tokens = [3 + (7 * i) % 300 for i in range(100)]
    assert len(tokens) > LOGIT_ROWS
    one, other = sequence(tokens, [10, 11, 12, 13, 14, 15, 16], prompt_logprobs=2), sequence([40, 41], [17], "lora")
    rows = [Row(one, 0, cut, cut == 100)] + ([Row(one, cut, 100 - cut, True)] if cut < 100 else [])

    results = [machine.runner.run(Step((whole(other), row)))[1] for row in rows]

    assert [len(result.prompt_logprobs or []) for result in results] == ([cut, 99 - cut] if cut < 100 else [99])
    entries = [entry for result in results for entry in result.prompt_logprobs or []]
    assert [entry.logprob for entry in entries] == pytest.approx(
        machine.oracle.logprobs(tokens[:1], tokens[1:], None), abs=1e-3
    )
    assert all(len(entry.top_ids) == 2 for entry in entries)
    assert results[-1].token_id is not None
    assert results[-1].logprobs is None


def test_a_step_of_copies_alone(machine: Machine) -> None:
    """Nothing to compute is no fault, and the copies are made."""
    machine.cache.layers[0][:, 20 * BLOCK : 21 * BLOCK] = 3.0

    assert machine.runner.run(Step((), copies=((20, 21),))) == []
    assert machine.cache.layers[0][:, 21 * BLOCK : 22 * BLOCK].eq(3.0).all()
