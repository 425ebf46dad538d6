"""build_batch: tokens, positions, slots, segments and logit rows of a step, against a loop over tokens; BatchBuilder:
step after step the same."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.spec import LINEARS
from engine.batch import BatchBuilder, ForwardBatch, Segment, build_batch
from engine.lora import LoraBank
from engine.model.config import ModelConfig
from engine.sequence import Sequence
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


def fields_of(batch: ForwardBatch) -> dict[str, Any]:
    """Numbers of every field, the bank apart; block tables as far as rows have blocks."""
    found: dict[str, Any] = {}
    for each in fields(batch):
        value = getattr(batch, each.name)
        if each.name != "bank":
            found[each.name] = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
    return found


EVENTS = ("on", "on", "on", "on", "leave", "join", "chunk", "swap", "strip", "move", "turn", "skip")


@settings(max_examples=60, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), min_size=1, max_size=60))
def test_a_step_after_another_is_laid_out_as_if_alone(events: list[tuple[str, int]]) -> None:
    """Whatever happens between two steps (rows come, go, prefill, change places, lose their blocks, are computed again;
    an adapter gets another slot), a builder's batches equal those that build_batch makes of each step; and batches that
    it made before stay as they were."""
    bank = LoraBank(SHAPE, 1 << 20, torch.float32)
    for index in range(3):
        bank.place(f"a{index}", random_adapter(SHAPE, {(0, LINEARS[index]): 2}, seed=index))
    builder = BatchBuilder(bank, BLOCK_SIZE)
    rows = [make_sequence([7 * n + 1] * (13 + n), [n], (None, "a0", "a1", "a2")[n % 4]) for n in range(6)]
    made: list[tuple[ForwardBatch, dict[str, Any]]] = []
    for event, pick in events:
        lengths = [1] * len(rows)
        happen(event, pick, rows, lengths, bank)
        for number, row in enumerate(rows):
            while len(row.blocks) * BLOCK_SIZE < len(row.tokens):
                row.blocks += [100 * number + len(row.blocks)]
        step = Step(tuple(Row(row, len(row.tokens) - length, length, True)
                          for row, length in zip(rows, lengths, strict=True)))  # fmt: skip
        batch = builder.build(step)
        made.append((batch, fields_of(batch)))
        assert made[-1][1] == fields_of(build_batch(step, bank, BLOCK_SIZE))
        if event != "skip":
            for row in rows:
                row.tokens.append(len(row.tokens))

    assert all(fields_of(batch) == then for batch, then in made)


def happen(event: str, pick: int, rows: list[Sequence], lengths: list[int], bank: LoraBank) -> None:
    index = pick % len(rows) if rows else 0
    if event == "join":
        rows.append(make_sequence([pick] * 15, [50 + pick], (None, "a1")[pick % 2]))
        lengths.append(1)
    elif event == "move":
        bank.evict("a0")
        bank.evict("a1")
        bank.place("a1", random_adapter(SHAPE, {(0, "q_proj"): 2}, seed=pick))
        bank.place("a0", random_adapter(SHAPE, {(0, "q_proj"): 2}, seed=pick))
    elif rows and event == "leave":
        del rows[index], lengths[index]
    elif rows and event == "chunk":
        lengths[index] = 3
    elif event == "swap":
        rows.reverse()
    elif rows and event == "strip":
        rows[index].blocks = [200 + block for block in rows[index].blocks]
    elif rows and event == "turn":
        del rows[index].tokens[-2:]
