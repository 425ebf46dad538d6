"""Sampler: exact against a naive oracle, right in distribution, blind to neighbours, quick on a real vocabulary."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.params import SamplingParams
from engine.protocol import TokenLogprobs
from engine.sampler import Sampler, greedy, likeliest, philox, uniform
from engine.sequence import Sequence

EOS = 2


def sequence(params: SamplingParams, tokens: list[int] | None = None, num_prompt: int = 1, **fields: int) -> Sequence:
    tokens = tokens or [1]
    return Sequence("r", fields.get("choice", 0), tokens, num_prompt, params, fields.get("seed", 0))


def random_logits(rows: int, vocab_size: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def adjusted(logits: np.ndarray, row: Sequence) -> np.ndarray:
    """The definition of penalties, bias, allowed ids and min_tokens, one token at a time."""
    x = logits.astype(np.float64).copy()
    output = row.tokens[row.num_prompt :]
    for token in set(row.tokens):
        x[token] = (
            x[token] / row.params.repetition_penalty if x[token] > 0 else x[token] * row.params.repetition_penalty
        )
    for token in set(output):
        x[token] -= row.params.presence_penalty + row.params.frequency_penalty * output.count(token)
    for token, bias in (row.params.logit_bias or {}).items():
        x[token] += bias
    if row.params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in row.params.allowed_token_ids]] = -np.inf
    if row.num_output < row.params.min_tokens:
        x[[EOS, *(row.params.stop_token_ids or ())]] = -np.inf
    return x


def kept(logits: np.ndarray, row: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Ids that min-p, top-k and top-p leave, likeliest first, and their probabilities (sum 1)."""
    x = adjusted(logits, row) / row.params.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = np.lexsort((np.arange(len(probs)), -probs))
    order = order[probs[order] >= row.params.min_p * probs.max()]
    if row.params.top_k > 0:
        order = order[: row.params.top_k]
    mass = probs[order].cumsum() / probs[order].sum()
    if row.params.top_p < 1:
        order = order[: int((mass < row.params.top_p).sum()) + 1]
    return order, probs[order] / probs[order].sum()


def expected(logits: np.ndarray, row: Sequence) -> tuple[int, float]:
    """The token of the oracle, and how close the draw came to the border of another token."""
    if row.params.is_greedy:
        return int(adjusted(logits, row).argmax()), 1.0
    ids, probs = kept(logits, row)
    draw = uniform([row.seed], [row.choice], [row.num_tokens])[0]
    cdf = probs.cumsum()
    return int(ids[min((cdf <= draw).sum(), len(ids) - 1)]), float(np.abs(np.append(cdf, 0) - draw).min())


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 128, 129, 300, 10**7]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.5]),
    logit_bias=st.sampled_from([None, {3: 5.0, 9: -100.0}]),
    min_tokens=st.sampled_from([0, 6]),
    max_tokens=st.just(10),
    stop_token_ids=st.sampled_from([None, [5, 11]]),
    allowed_token_ids=st.sampled_from([None, None, None, [2, 5, 7, 20]]),
)
TOKENS = st.lists(st.integers(0, 20), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.tuples(PARAMS, TOKENS, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6),
    vocab_size=st.sampled_from([24, 64, 130, 1000]),
    spread=st.sampled_from([0.2, 2.0, 6.0]),
    seed=st.integers(0, 1000),
)
def test_tokens_equal_a_naive_oracle(
    rows: list[tuple[SamplingParams, list[int], int]], vocab_size: int, spread: float, seed: int
) -> None:
    """Any mix of parameters in one batch gives each row the token of a float64 definition without prefilter."""
    logits = random_logits(len(rows), vocab_size, spread, seed)
    sequences = [sequence(p, tokens, 1 + len(tokens) // 2, seed=s) for p, tokens, s in rows]

    sampled = Sampler([EOS]).sample(logits.clone(), sequences)

    for row, outcome, values in zip(sequences, sampled, logits.numpy(), strict=True):
        token, margin = expected(values, row)
        if margin > 1e-5:
            assert outcome.token_id == token


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.3, top_k=30),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=1.0, top_p=0.97, top_k=400),
    ],
    ids=["top-p", "all", "top-k", "min-p", "top-k+p"],
)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_draws_follow_the_distribution(params: SamplingParams, spread: float) -> None:
    """Over many seeds the tokens fit the truncated distribution (chi-square), beyond the prefilter too, and none falls
    outside of what is kept."""
    count = 4000
    logits = random_logits(1, 600, spread)
    ids, probs = kept(logits[0].numpy(), sequence(params))
    rows = [sequence(params, seed=seed) for seed in range(count)]

    tokens = np.array([s.token_id for s in Sampler([EOS]).sample(logits.repeat(count, 1), rows)])

    assert set(tokens.tolist()) <= set(ids.tolist())
    observed = np.bincount(tokens, minlength=600)[ids].astype(float)
    wanted = probs * count
    rare = wanted < 5
    if rare.any():
        observed, wanted = (
            np.append(observed[~rare], observed[rare].sum()),
            np.append(wanted[~rare], wanted[rare].sum()),
        )
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom) + 5


def test_ties_at_the_border_of_the_candidates_are_seen() -> None:
    """bf16 logits tie often: with all tokens equal, top-k keeps the lowest ids and the draw is uniform over them."""
    logits = torch.zeros(2000, 500)
    rows = [sequence(SamplingParams(top_k=200), seed=seed) for seed in range(2000)]

    tokens = np.array([s.token_id for s in Sampler([EOS]).sample(logits, rows)])

    assert tokens.max() < 200
    assert abs(tokens.mean() - 99.5) < 5
    assert len(np.unique(tokens)) > 190


def test_a_seeded_row_is_blind_to_its_neighbours() -> None:
    """SM-01: the same seeded row gives the same token alone, next to unseeded, seeded, greedy, penalised and logprob
    rows, at every place of the batch, for peaked and for flat logits."""
    params = SamplingParams(temperature=0.8, top_p=0.95, presence_penalty=0.5)
    crowd = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5, logprobs=5),
        SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, min_p=0.1, min_tokens=5),
    ]
    sampler = Sampler([EOS])
    for spread in (0.3, 5.0):
        for trial in range(20):
            logits = random_logits(5, 3000, spread, trial)
            alone = sampler.sample(logits[:1].clone(), [sequence(params, [1, 7, 9], 1, seed=42)])[0]
            for place in range(5):
                order = [*range(1, 5)]
                order.insert(place, 0)
                rows = [sequence(p, [1, 3, 4], 1, seed=trial * 10 + i) for i, p in enumerate(crowd)]
                rows.insert(place, sequence(params, [1, 7, 9], 1, seed=42))
                assert sampler.sample(logits[order].clone(), rows)[place] == alone


def test_draws_have_no_history() -> None:
    """f(seed, choice, position): equal arguments give equal numbers, and each argument matters."""
    base = uniform([5], [0], [10])
    assert base == uniform([5, 9], [0, 3], [10, 2])[:1]
    others = [
        uniform([6], [0], [10]),
        uniform([5], [1], [10]),
        uniform([5], [0], [11]),
        uniform([5 + 2**32], [0], [10]),
    ]
    assert len({float(x[0]) for x in [base, *others]}) == 5
    many = uniform(range(50_000), [0] * 50_000, [7] * 50_000)
    assert many.min() >= 0
    assert many.max() < 1
    assert np.abs(np.histogram(many, 50, (0, 1))[0] - 1000).max() < 160
    assert uniform([-1], [0], [0]) == uniform([2**64 - 1], [0], [0])


@pytest.mark.parametrize(
    ("word", "result"),
    [(0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd")],
)
def test_philox_known_answers(word: int, result: str) -> None:
    """The generator is Philox4x32-10: the known answers of its authors' library (Random123)."""
    filled = np.full(1, word, np.uint64)

    words = philox((filled,) * 4, (filled,) * 2)

    assert " ".join(f"{int(w[0]):08x}" for w in words) == result


def test_penalties_are_counted_as_tokens_arrive() -> None:
    """Incremental counts equal counts from scratch at each step, also after a sequence left and came back."""
    params = SamplingParams(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.8, max_tokens=None
    )
    row, other = sequence(params, [1, 2, 3, 3], 4, seed=1), sequence(params, [5], 1, seed=2)
    sampler = Sampler([EOS])
    for step in range(150):
        logits = random_logits(2, 90, 2.0, step)
        rows = [other] if step % 7 == 3 else [row, other]
        sampled = sampler.sample(logits[: len(rows)].clone(), rows)
        fresh = Sampler([EOS]).sample(logits[: len(rows)].clone(), rows)
        assert [s.token_id for s in sampled] == [s.token_id for s in fresh]
        for one, outcome in zip(rows, sampled, strict=True):
            token, margin = expected(logits[rows.index(one)].numpy(), one)
            assert margin < 1e-5 or outcome.token_id == token
            assert outcome.token_id is not None
            one.tokens.append(outcome.token_id)


def test_min_tokens_blocks_every_way_to_stop() -> None:
    """No end-of-sequence and no stop id before min_tokens, however likely; from then on they win again."""
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[7], ignore_eos=True)
    logits = torch.zeros(1, 20)
    logits[0, [EOS, 7, 9]] = torch.tensor([9.0, 8.0, 1.0])

    tokens = [Sampler([EOS]).sample(logits.clone(), [sequence(params, [1] * n)])[0].token_id for n in (1, 2, 3)]

    assert tokens == [9, 9, EOS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 4096])
def test_greedy_is_argmax(vocab_size: int, dtype: torch.dtype) -> None:
    """The lowest id among the largest logits, whatever the vocabulary's size."""
    logits = random_logits(50, vocab_size).to(dtype)
    rows = [sequence(SamplingParams(temperature=1e-6))] * 50

    tokens, is_finite = greedy(logits.float())
    assert tokens.tolist() == logits.float().argmax(-1).tolist()
    assert is_finite.all()
    assert [s.token_id for s in Sampler([EOS]).sample(logits, rows)] == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize(("vocab_size", "count"), [(5, 20), (128, 128), (1000, 20), (5000, 128)])
def test_likeliest_equals_topk(vocab_size: int, count: int) -> None:
    """Searching groups by their maxima loses none of the largest."""
    logits = random_logits(20, vocab_size)

    values, ids = likeliest(logits, count)

    assert torch.equal(values, logits.topk(min(count, vocab_size), -1).values)
    assert torch.equal(logits.gather(1, ids), values)


def test_logprobs_are_those_before_truncation() -> None:
    """Own and top logprobs are the log softmax of penalised, biased logits; rows ask for different numbers of them, and
    truncation and temperature change nothing."""
    bias = {4: 2.0}
    logits = random_logits(3, 300)
    rows = [
        sequence(SamplingParams(temperature=0.7, top_k=1, logprobs=3, logit_bias=bias)),
        sequence(SamplingParams(temperature=0.0)),
        sequence(SamplingParams(temperature=1.0, top_p=0.4, logprobs=0)),
    ]
    wanted = torch.log_softmax(logits[0].double() + torch.zeros(300).index_fill(0, torch.tensor(4), 2.0), -1)

    first, second, third = Sampler([EOS]).sample(logits.clone(), rows)

    assert first.logprobs is not None
    assert first.token_id == first.logprobs.top_ids[0]
    assert first.logprobs.logprob == pytest.approx(float(wanted[first.token_id]), abs=1e-5)
    assert first.logprobs.top_ids == wanted.topk(3).indices.tolist()
    assert first.logprobs.top_logprobs == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-5)
    assert second.logprobs is None
    assert third.logprobs is not None
    assert third.logprobs.top_ids == []


def test_logprobs_are_always_numbers() -> None:
    """Blocked tokens among the top of a small vocabulary read as −9999, never as −inf, which JSON can't say."""
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[0, 3], logprobs=4)

    entry = Sampler([EOS]).sample(torch.tensor([[5.0, 1.0, 5.0, 5.0]]), [sequence(params)])[0].logprobs

    assert entry == TokenLogprobs(0.0, [1, 0, 2, 3], [0.0, -9999.0, -9999.0, -9999.0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 77, 129])
def test_a_row_that_is_not_finite_harms_nobody(bad: float, place: int) -> None:
    """AL-16: when an adapter's values overflow inside the model, its row gets no token; the others get theirs."""
    params = [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(temperature=0.8, top_p=0.9, logprobs=2)] * 2
    logits = random_logits(4, 130)
    wanted = Sampler([EOS]).sample(logits.clone(), [sequence(one) for one in params])
    logits[:2, place] = bad

    sampled = Sampler([EOS]).sample(logits, [sequence(one) for one in params])

    assert [one.token_id for one in sampled[:2]] == [None, None]
    assert sampled[2:] == wanted[2:]


def test_cost_on_a_real_vocabulary() -> None:
    """32 rows at temperature 0.8 and top-p 0.9 over 49152 tokens cost less than two full sorts of one row per row."""
    logits = random_logits(32, 49152, 1.0)
    logits[:, :40] += 9.0
    rows = [sequence(SamplingParams(temperature=0.8, top_p=0.9), seed=i) for i in range(32)]
    sampler = Sampler([EOS])

    def best_of(action: object, repeats: int = 7) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    ours = best_of(lambda: sampler.sample(logits.clone(), rows))
    sort = best_of(lambda: torch.sort(logits, dim=-1, descending=True), 3)

    assert ours < sort / 3
