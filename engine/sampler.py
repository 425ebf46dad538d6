"""Sampler: logits → token ids and logprobs, all rows of a step at once. Knows no model, no batch and no text.

One draw per row, u = f(seed, choice, position), a counter-based generator without history; the token is found by
inverse CDF among the likeliest tokens in canonical order (probability down, then id up). A row's token depends on its
own logits, parameters and draw only, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.penalties import Penalties
from engine.protocol import TokenLogprobs
from engine.sequence import Sequence
from engine.step import Sampled

Draw = Callable[[Tensor, Tensor, np.ndarray, np.ndarray], np.ndarray]
"""(logits [S, V] fp32, temperatures [S], limits [3, S]: top_k, top_p, min_p, draws [S] in [0, 1)) → token ids [S], on
the host: where each draw falls in what the limits leave of softmax(logits / temperature), see `_rank`."""

Greedy = Callable[[Tensor], np.ndarray]
"""logits [S, V] fp32 → [2, S] on the host: what `greedy` finds."""


@dataclass(frozen=True)
class Queued:
    """A Draw whose ids stay on the device, −1 for rows that it can't decide: so a step ends with one copy."""

    draw: Callable[[Tensor, Tensor, np.ndarray, np.ndarray], Tensor]


Choose = Callable[[Tensor, Tensor, np.ndarray, np.ndarray, bool], np.ndarray]
"""(probabilities [S, C] from the largest down, their ids, limits, draws, whether they are the whole vocabulary) → token
ids [S] on the host, −1 for rows that need to see more than their candidates."""

Drawn = TypeVar("Drawn", np.ndarray, Tensor)

NUM_CANDIDATES = 128
GROUP = 64
"""Width of the groups whose maxima find the candidates: one pass over the vocabulary, then little work."""
LOWEST_LOGPROB = -9999.0


class Sampler:
    """Keeps only the penalty counts of the sequences of the last call, rebuilt from their tokens when missing."""

    def __init__(
        self, eos_token_ids: Sized[int], draw: Draw | Queued | None = None, greedy: Greedy | None = None
    ) -> None:
        """draw, greedy: faster ways than torch_draw and torch_greedy."""
        self._draw = draw or torch_draw
        self._greedy = greedy or torch_greedy
        self._penalties = Penalties(eos_token_ids)

    def sample(self, logits_SV: Tensor, sequences: Sized[Sequence]) -> list[Sampled]:
        """Chooses what follows each sequence. logits [S, V] in any dtype; fp32 logits are changed in place. A row whose
        logits are not finite (an adapter's values overflow) gets no token."""
        logits_SV = logits_SV.float()
        self._penalties.apply(logits_SV, sequences)
        tokens, is_sound = self._choose(logits_SV, sequences)
        logprobs = _logprobs(logits_SV, tokens, sequences)
        chosen = [Sampled(int(token), logprobs.get(i)) for i, token in enumerate(tokens)]
        return [one if sound else Sampled(None) for one, sound in zip(chosen, is_sound, strict=True)]

    def _choose(self, logits_SV: Tensor, sequences: Sized[Sequence]) -> np.ndarray:
        """[2, S] on the host: tokens, and which are sound."""
        drawn = [i for i, s in enumerate(sequences) if not s.params.is_greedy]
        draw: Draw = torch_draw
        if isinstance(self._draw, Queued):
            best_S, is_sound_S = greedy(logits_SV)
            if drawn:
                tokens = _drawn(logits_SV, drawn, sequences, self._draw.draw)
                best_S = best_S.index_copy(0, torch.tensor(drawn, device=best_S.device), tokens)
            chosen = _on_host(best_S, is_sound_S)  # all that a step copies, but for rows that need more, which are rare
            drawn = [i for i in drawn if chosen[0, i] < 0]
        else:
            chosen, draw = self._greedy(logits_SV), self._draw
        drawn = [i for i in drawn if chosen[1, i]]
        if drawn:
            chosen[0, drawn] = _drawn(logits_SV, drawn, sequences, draw)
        return chosen


def _on_host(tokens_S: Tensor, is_sound_S: Tensor) -> np.ndarray:
    both: np.ndarray = torch.stack((tokens_S, is_sound_S.long())).cpu().numpy()
    return both


def _logprobs(logits_SV: Tensor, tokens_S: np.ndarray, sequences: Sized[Sequence]) -> dict[int, TokenLogprobs]:
    """By row, where they were asked for."""
    asked = {i: s.params.logprobs for i, s in enumerate(sequences) if s.params.logprobs is not None}
    if not asked:
        return {}
    rows = list(asked)
    entries = token_logprobs(logits_SV[rows], tokens_S[rows], max(asked.values()))
    return dict(zip(rows, map(_shorten, entries, asked.values()), strict=True))


def torch_greedy(logits_SV: Tensor) -> np.ndarray:
    return _on_host(*greedy(logits_SV))


def greedy(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, the lowest id among equals, and whether its logit (NaN if any is) is finite.
    Several times faster than argmax on a CPU."""
    groups_SGW = _grouped(logits_SV)
    best_S = groups_SGW.amax(-1).argmax(-1)
    inside_S = groups_SGW[torch.arange(len(best_S), device=best_S.device), best_S].argmax(-1)
    tokens_S = best_S * GROUP + inside_S
    return tokens_S, torch.isfinite(logits_SV.gather(1, tokens_S[:, None])[:, 0])


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


def _drawn(
    logits_SV: Tensor, rows: list[int], sequences: Sized[Sequence], draw: Callable[..., Drawn]
) -> Drawn:  # fmt: skip
    """One token per row of `rows`."""
    params, chosen = [sequences[i].params for i in rows], [sequences[i] for i in rows]
    selected_SV = logits_SV if len(rows) == len(logits_SV) else logits_SV[rows]
    temperature_S = torch.tensor([p.temperature for p in params], device=logits_SV.device)
    vocab_size = selected_SV.shape[1]
    limits = np.array([(p.top_k if 0 < p.top_k < vocab_size else np.inf, p.top_p, p.min_p) for p in params]).T
    draws = uniform([s.seed for s in chosen], [s.choice for s in chosen], [s.num_tokens for s in chosen])
    return draw(selected_SV, temperature_S, limits, draws)


def torch_draw(
    logits_SV: Tensor, temperature_S: Tensor, limits: np.ndarray, draws_S: np.ndarray, choose: Choose | None = None
) -> np.ndarray:
    """On any device: first among the candidates; a row that they can't decide is sorted whole."""
    probs_SV = torch.softmax(logits_SV / temperature_S[:, None], -1)
    probs_SC, ids_SC = likeliest(probs_SV, NUM_CANDIDATES)
    is_whole = probs_SC.shape[1] == probs_SV.shape[1]
    tokens = (choose or choose_on_host)(probs_SC, ids_SC, limits, draws_S, is_whole)
    for i in np.flatnonzero(tokens < 0):
        tokens[i] = _draw_from_all(probs_SV[i].cpu().numpy(), limits[:, i : i + 1], draws_S[i : i + 1])
    return tokens


def choose_on_host(
    probs_SC: Tensor, ids_SC: Tensor, limits: np.ndarray, draws_S: np.ndarray, is_whole: bool
) -> np.ndarray:
    probs, ids = probs_SC.cpu().numpy(), ids_SC.cpu().numpy()
    order = np.lexsort((ids, -probs))
    ranks = _rank(probs, limits, draws_S, is_whole)
    tokens = np.take_along_axis(ids, np.take_along_axis(order, ranks[:, None], 1), 1)[:, 0]
    return np.where(ranks < 0, -1, tokens)


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
