"""build_batch: tokens, positions, slots, segments and logit rows of a step, against a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.spec import LINEARS
from engine.batch import Segment, build_batch
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.step import Row, Step
from tests.engine.forward import BLOCK_SIZE, make_sequence, random_adapter
from tests.tiny import tiny_config

SHAPE = ModelConfig.from_dict(tiny_config()).base_shape()


@pytest.fixture(scope="module")
def bank() -> LoraBank:
    bank = LoraBank(SHAPE, 1 << 20, torch.float32)
    for index in range(3):
        bank.place(f"a{index}", random_adapter(SHAPE, {(0, LINEARS[index]): 2}, seed=index))
    return bank


spans = st.tuples(st.integers(0, 60), st.integers(1, 40), st.sampled_from([None, "a0", "a1", "a2"]), st.booleans())


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(spans, max_size=9))
def test_every_token_is_laid_out_once(bank: LoraBank, rows: list[tuple[int, int, str | None, bool]]) -> None:
    """Each row's tokens are consecutive, with their position, slot and adapter; logits are asked for in the order of
    the step's rows, at the last token of those that sample."""
    step_rows = []
    for index, (start, length, adapter, samples) in enumerate(rows):
        tokens = [1000 * index + position for position in range(start + length + (0 if samples else 3))]
        blocks = [20 * index + block for block in range(8)][::-1]
        step_rows.append(Row(make_sequence(tokens, blocks, adapter), start, length, samples))

    batch = build_batch(Step(tuple(step_rows)), bank, BLOCK_SIZE)

    ids, positions, slots = batch.tokens_T.tolist(), batch.positions_T.tolist(), batch.slots_T.tolist()
    assert sorted(ids) == sorted(
        t for row in step_rows for t in row.sequence.tokens[row.start : row.start + row.num_tokens]
    )
    slot_at = {t: s.slot for s in batch.segments for t in range(s.start, s.end)}
    for place, (token, position, slot) in enumerate(zip(ids, positions, slots, strict=True)):
        row = step_rows[token // 1000]
        assert position == token % 1000
        assert slot == row.sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        adapter = row.sequence.adapter
        assert slot_at.get(place, -1) == (bank.slot(adapter.digest) if adapter else -1)
    wanted = [row.sequence.tokens[row.start + row.num_tokens - 1] for row in step_rows if row.samples]
    assert [ids[place] for place in batch.logit_rows.tolist()] == wanted
    assert batch.logit_counts == tuple(int(row.samples) for row in step_rows)


def test_base_rows_come_first_and_adapters_are_single_slices(bank: LoraBank) -> None:
    """Tokens are sorted by adapter: one segment per adapter, none for the base."""
    adapters = ["a1", None, "a0", "a1", None]
    rows = tuple(Row(make_sequence([5] * 9, [i], name), 0, 2 + i, False) for i, name in enumerate(adapters))

    batch = build_batch(Step(rows), bank, BLOCK_SIZE)

    assert batch.segments == (Segment(bank.slot("a0"), 9, 13), Segment(bank.slot("a1"), 13, 20))


@pytest.mark.parametrize(
    ("start", "length", "samples", "places"),
    [(0, 4, False, [0, 1, 2, 3]), (4, 6, True, [0, 1, 2, 3, 4, 5]), (10, 1, True, [0]), (8, 2, True, [0, 1])],
)
def test_prompt_logprobs_ask_for_the_prompts_own_positions(
    start: int, length: int, samples: bool, places: list[int]
) -> None:
    """With prompt_logprobs, every computed prompt position that has a successor in the prompt gets logits, then the
    sampled one; decode rows only theirs."""
    params: dict[str, Any] = {"prompt_logprobs": 1}
    sequence = make_sequence(list(range(10)), [0], **params)
    sequence.tokens += [10] * max(0, start + length - 10)

    batch = build_batch(Step((Row(sequence, start, length, samples),)), None, BLOCK_SIZE)

    assert batch.logit_rows.tolist() == places
    assert batch.logit_counts == (len(places),)
