"""Sampler: logits → token ids and logprobs, all rows of a step at once. Knows no model, no batch and no text.

One draw per row, u = f(seed, choice, position), a counter-based generator without history; the token is found by
inverse CDF among the likeliest tokens in canonical order (probability down, then id up). A row's token depends on its
own logits, parameters and draw only, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence as Sized

import numpy as np
import torch
from torch import Tensor

from engine.penalties import Penalties
from engine.protocol import TokenLogprobs
from engine.sequence import Sequence
from engine.step import Sampled

NUM_CANDIDATES = 128
GROUP = 64
"""Width of the groups whose maxima find the candidates: one pass over the vocabulary, then little work."""
LOWEST_LOGPROB = -9999.0


class Sampler:
    """Keeps only the penalty counts of the sequences of the last call, rebuilt from their tokens when missing."""

    def __init__(self, eos_token_ids: Sized[int]) -> None:
        self._penalties = Penalties(eos_token_ids)

    def sample(self, logits_SV: Tensor, sequences: Sized[Sequence]) -> list[Sampled]:
        """Chooses what follows each sequence. logits [S, V] in any dtype; fp32 logits are changed in place. A row whose
        logits are not finite (an adapter's values overflow) gets no token."""
        logits_SV = logits_SV.float()
        self._penalties.apply(logits_SV, sequences)
        tokens = greedy(logits_SV)
        is_sound = torch.isfinite(logits_SV[range(len(tokens)), tokens]).cpu().numpy()  # the largest: NaN if any is
        drawn = [i for i, s in enumerate(sequences) if is_sound[i] and not s.params.is_greedy]
        if drawn:
            tokens[drawn] = _draw(logits_SV, drawn, [sequences[i] for i in drawn])
        logprobs = _logprobs(logits_SV, tokens, sequences)
        chosen = [Sampled(int(token), logprobs.get(i)) for i, token in enumerate(tokens)]
        return [one if sound else Sampled(None) for one, sound in zip(chosen, is_sound, strict=True)]


def _logprobs(logits_SV: Tensor, tokens_S: np.ndarray, sequences: Sized[Sequence]) -> dict[int, TokenLogprobs]:
    """By row, where they were asked for."""
    asked = {i: s.params.logprobs for i, s in enumerate(sequences) if s.params.logprobs is not None}
    if not asked:
        return {}
    rows = list(asked)
    entries = token_logprobs(logits_SV[rows], tokens_S[rows], max(asked.values()))
    return dict(zip(rows, map(_shorten, entries, asked.values()), strict=True))


def greedy(logits_SV: Tensor) -> np.ndarray:
    """The likeliest token of each row, the lowest id among equals. Several times faster than argmax on a CPU."""
    groups_SGW = _grouped(logits_SV)
    best_S = groups_SGW.amax(-1).argmax(-1)
    inside_S = groups_SGW[torch.arange(len(best_S), device=best_S.device), best_S].argmax(-1)
    return (best_S * GROUP + inside_S).cpu().numpy()


def token_logprobs(logits_SV: Tensor, tokens_S: np.ndarray, num_top: int) -> list[TokenLogprobs]:
    """log softmax of `logits` (temperature 1) at each row's token and at its `num_top` likeliest tokens."""
    own_S1 = torch.from_numpy(tokens_S).to(logits_SV.device)[:, None]
    total_S1 = torch.logsumexp(logits_SV, -1, keepdim=True)
    own = (logits_SV.gather(1, own_S1) - total_S1).clamp_(min=LOWEST_LOGPROB)[:, 0].tolist()
    if num_top == 0:
        return [TokenLogprobs(value, [], []) for value in own]
    values_SC, ids_SC = likeliest(logits_SV, num_top)
    values = (values_SC - total_S1).clamp_(min=LOWEST_LOGPROB).cpu().numpy()
    ids = ids_SC.cpu().numpy()
    order = np.lexsort((ids, -values))
    ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
    return [TokenLogprobs(*entry) for entry in zip(own, ids.tolist(), values.tolist(), strict=True)]


def likeliest(values_SV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row, largest first, and their ids; all of them if there are fewer.

    The largest C elements lie in the C groups of the largest maxima, so only those are searched.
    """
    groups_SGW = _grouped(values_SV)
    count = min(count, values_SV.shape[1])
    best_SC = groups_SGW.amax(-1).topk(min(count, groups_SGW.shape[1]), -1).indices
    members_SN = groups_SGW.gather(1, best_SC[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    largest_SC, index_SC = members_SN.topk(count, -1)
    return largest_SC, best_SC.gather(1, index_SC // GROUP) * GROUP + index_SC % GROUP


def _grouped(values_SV: Tensor) -> Tensor:
    """[S, groups, GROUP], the last group filled with −inf."""
    missing = -values_SV.shape[1] % GROUP
    if missing:
        values_SV = torch.nn.functional.pad(values_SV, (0, missing), value=-torch.inf)
    return values_SV.reshape(len(values_SV), -1, GROUP)


def _shorten(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, entry.top_ids[:count], entry.top_logprobs[:count])


def _draw(logits_SV: Tensor, rows: list[int], sequences: list[Sequence]) -> np.ndarray:
    """One token per row of `rows`: first among the candidates; a row that they can't decide is sorted whole."""
    params = [s.params for s in sequences]
    selected_SV = logits_SV if len(rows) == len(logits_SV) else logits_SV[rows]
    temperature_S1 = torch.tensor([[p.temperature] for p in params], device=logits_SV.device)
    probs_SV = torch.softmax(selected_SV / temperature_S1, -1)
    vocab_size = probs_SV.shape[1]
    limits = np.array([(p.top_k if 0 < p.top_k < vocab_size else np.inf, p.top_p, p.min_p) for p in params]).T
    draws = uniform([s.seed for s in sequences], [s.choice for s in sequences], [s.num_tokens for s in sequences])
    probs_SC, ids_SC = (part.cpu().numpy() for part in likeliest(probs_SV, NUM_CANDIDATES))
    order = np.lexsort((ids_SC, -probs_SC))
    ranks = _rank(probs_SC, limits, draws, is_whole=probs_SC.shape[1] == vocab_size)
    tokens = np.take_along_axis(ids_SC, np.take_along_axis(order, ranks[:, None], 1), 1)[:, 0]
    for i in np.flatnonzero(ranks < 0):
        tokens[i] = _draw_from_all(probs_SV[i].cpu().numpy(), limits[:, i : i + 1], draws[i : i + 1])
    return tokens


def _draw_from_all(probs_V: np.ndarray, limits: np.ndarray, draw: np.ndarray) -> int:
    """Sorts values only, which is much cheaper than sorting ids along, then looks up whose value the rank has."""
    sorted_V = np.sort(probs_V)[::-1]
    rank = _rank(sorted_V[None], limits, draw, is_whole=True)[0]
    num_above = np.searchsorted(-sorted_V, -sorted_V[rank])
    return int(np.flatnonzero(probs_V == sorted_V[rank])[rank - num_above])


def _rank(probs_SC: np.ndarray, limits: np.ndarray, draws_S: np.ndarray, is_whole: bool) -> np.ndarray:
    """Inverse CDF over the kept tokens, min-p first, then top-k, then top-p, each of what the former left.

    probs [S, C] from the largest down; limits [3, S] are top_k, top_p, min_p. Unless they are the whole vocabulary,
    only those above the last one are known to be the likeliest; −1 marks the rows that need to see more of it.
    """
    top_k, top_p, min_p = limits
    index = np.arange(len(probs_SC))
    cdf_SC = probs_SC.cumsum(1, dtype=np.float64)
    num_known = np.full(len(probs_SC), probs_SC.shape[1]) if is_whole else (probs_SC > probs_SC[:, -1:]).sum(1)
    num_floor = np.minimum((probs_SC >= min_p[:, None] * probs_SC[:, :1]).sum(1), num_known)
    num_kept = np.minimum(num_floor, top_k).astype(np.int64)
    is_all = (top_k == np.inf) & (min_p == 0.0) & (not is_whole)  # nothing cut: the mass is 1 without looking
    is_decided = is_whole | is_all | (num_floor < num_known) | (top_k <= num_known)
    mass = np.where(is_all, 1.0, cdf_SC[index, np.maximum(num_kept, 1) - 1])
    num_nucleus = (cdf_SC < (top_p * mass)[:, None]).sum(1) + 1
    cut = top_p < 1.0
    is_decided &= ~cut | (num_nucleus <= num_kept)
    num_kept = np.where(cut, np.minimum(num_nucleus, num_kept), num_kept)
    mass = np.where(cut, cdf_SC[index, np.maximum(num_kept, 1) - 1], mass)
    chosen = (cdf_SC <= (draws_S * mass)[:, None]).sum(1)
    is_decided &= ~is_all | cut | (chosen < num_known)
    chosen = np.clip(chosen, 0, np.maximum(num_kept, 1) - 1)
    return np.where(is_decided & (num_kept > 0), chosen, -1)


def uniform(seeds: Sized[int], choices: Sized[int], positions: Sized[int]) -> np.ndarray:
    """f(seed, choice, position) in [0, 1), 53 bits: Philox4x32-10 (Salmon et al., SC 2011) with the seed as key and
    (position, 0, choice, 0) as counter."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    zero = np.zeros(len(key), np.uint64)
    counter = (np.array(positions, np.uint64), zero, np.array(choices, np.uint64), zero)
    words = philox(counter, (key & _LOW, key >> _SHIFT))
    bits = (words[0] << _SHIFT | words[1]) >> np.uint64(11)
    draws: np.ndarray = np.ldexp(bits.astype(np.float64), -53)
    return draws


_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: tuple[np.ndarray, ...], key: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10: four 32-bit words per counter, held in uint64 arrays."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        low, high = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (high >> _SHIFT) ^ c1 ^ k0, high & _LOW, (low >> _SHIFT) ^ c3 ^ k1, low & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return c0, c1, c2, c3
