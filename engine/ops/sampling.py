"""Triton kernel that draws tokens: inverse CDF among each row's likeliest tokens. Only ids go back to the host. Knows
no logits and no sequence; engine/sampler.py is its caller and, in numpy, its oracle."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.launch import power_of_2
from engine.sampler import NUM_CANDIDATES, likeliest


@triton.jit(do_not_specialize=["num_rows", "num_candidates"])
def choose_kernel(
    probs_ptr, ids_ptr, settings_ptr, tokens_ptr, num_rows, num_candidates, IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of row s with candidates p_1 ≥ p_2 ≥ … and u = draw[s]: min-p, then top-k, then top-p, each of what the former
    left; the first candidate whose cumulated probability exceeds u · Σ kept, equals ordered by id. −1 where what is not
    among the candidates could matter. One program per row, in fp64.

    probs, ids [S, C]; settings [4, S] are top_k (∞ = none), top_p, min_p, draw; tokens [S]. IS_WHOLE: the candidates
    are the whole vocabulary. Else only those above the last one are known to be the likeliest.
    """
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    is_in = index < num_candidates
    probs = tl.load(probs_ptr + row * num_candidates + index, mask=is_in, other=0.0).to(tl.float64)
    ids = tl.load(ids_ptr + row * num_candidates + index, mask=is_in, other=0).to(tl.int32)
    top_k, top_p = tl.load(settings_ptr + row), tl.load(settings_ptr + num_rows + row)
    min_p, draw = tl.load(settings_ptr + 2 * num_rows + row), tl.load(settings_ptr + 3 * num_rows + row)
    cumulated = tl.cumsum(probs, 0)
    known = num_candidates.to(tl.float64)
    if not IS_WHOLE:
        known = _count(is_in & (probs > _at(probs, index, num_candidates - 1)))
    floor = tl.minimum(_count(is_in & (probs >= min_p * _at(probs, index, 0))), known)
    kept = tl.minimum(floor, top_k)
    is_open = _flag(top_k == float("inf")) * _flag(min_p == 0.0)  # nothing cut: the mass is 1 without looking
    is_decided = is_open + _flag(floor < known) + _flag(top_k <= known)
    if IS_WHOLE:
        is_open, is_decided = is_open * 0.0, is_decided * 0.0 + 1.0
    mass = tl.where(is_open > 0.0, 1.0, _at(cumulated, index, tl.maximum(kept, 1.0) - 1.0))
    nucleus = _count(is_in & (cumulated < top_p * mass)) + 1.0
    is_cut = _flag(top_p < 1.0)
    is_decided *= _flag(nucleus <= kept) + 1.0 - is_cut
    kept = tl.where(is_cut > 0.0, tl.minimum(nucleus, kept), kept)
    mass = tl.where(is_cut > 0.0, _at(cumulated, index, tl.maximum(kept, 1.0) - 1.0), mass)
    chosen = _count(is_in & (cumulated <= draw * mass))
    is_decided *= (1.0 - is_open + is_cut + _flag(chosen < known)) * kept
    chosen = tl.minimum(chosen, tl.maximum(kept, 1.0) - 1.0)
    wanted = _at(probs, index, chosen)
    is_equal = is_in & (probs == wanted)  # these lie side by side, in any order: the one that is meant has as many
    is_smaller = is_equal[None, :] & (ids[None, :] < ids[:, None])  # of smaller id as there are places before it
    place = tl.sum(is_smaller.to(tl.int32), 1) + _count(is_in & (probs > wanted)).to(tl.int32)
    token = tl.sum(tl.where(is_equal & (place == chosen.to(tl.int32)), ids, 0), 0)
    tl.store(tokens_ptr + row, tl.where(is_decided > 0.0, token, -1))


@triton.jit
def _count(is_so):
    return tl.sum(is_so.to(tl.float64), 0)


@triton.jit
def _flag(is_so):
    return tl.where(is_so, 1.0, 0.0)


@triton.jit
def _at(values, index, place):
    """values[place]."""
    return tl.sum(tl.where(index == place, values, 0.0), 0)


def choose(
    probs_SC: Tensor, ids_SC: Tensor, limits: np.ndarray, draws_S: np.ndarray, is_whole: bool
) -> Tensor:  # fmt: skip
    """Ids [S], −1 for rows that need to see more than their candidates. limits [3, S]: top_k, top_p, min_p."""
    num_rows, num_candidates = probs_SC.shape
    rows_4S = np.ascontiguousarray(np.concatenate((limits, draws_S[None])), np.float64)  # limits may lie transposed
    settings = torch.from_numpy(rows_4S).to(probs_SC.device)
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=probs_SC.device)
    choose_kernel[(num_rows,)](
        probs_SC.contiguous(), ids_SC.contiguous(), settings, tokens_S, num_rows, num_candidates, IS_WHOLE=is_whole,
        BLOCK=power_of_2(num_candidates), num_warps=8,
    )  # fmt: skip
    return tokens_S


def draw(logits_SV: Tensor, temperature_S: Tensor, limits: np.ndarray, draws_S: np.ndarray) -> Tensor:
    """See engine.sampler.Queued."""
    probs_SV = torch.softmax(logits_SV / temperature_S[:, None], -1)
    probs_SC, ids_SC = likeliest(probs_SV, NUM_CANDIDATES)
    return choose(probs_SC, ids_SC, limits, draws_S, probs_SC.shape[1] == probs_SV.shape[1])
