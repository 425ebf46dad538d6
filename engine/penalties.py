"""Penalties: what a request's parameters change in its logits before a token is chosen: repetition, presence and
frequency penalties, logit_bias, and the ids that min_tokens blocks. Keeps counts per sequence, sparse and incremental:
the work of a step is proportional to the distinct tokens of the texts, never to the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Sized

import numpy as np
import torch
from torch import Tensor

from engine.sequence import Sequence

Entries = tuple[np.ndarray, ...]
"""Parallel arrays, first the token ids (distinct within one sequence), then what belongs to each."""


BLOCKED = float(np.finfo(np.float32).min)
"""Probability 0, yet above the −inf that pads a vocabulary."""


class Seen:
    """How often each token occurs in one sequence: `ids` are distinct, `counts` are those in the output."""

    def __init__(self, sequence: Sequence) -> None:
        self._first = 0 if sequence.params.repetition_penalty != 1.0 else sequence.num_prompt
        self._length = sequence.num_tokens
        counted = np.asarray(sequence.tokens[self._first :], dtype=np.int64)
        distinct, inverse = np.unique(counted, return_inverse=True)
        output = inverse[sequence.num_prompt - self._first :]
        self._size = len(distinct)
        self._ids = np.concatenate([distinct, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._counts[: self._size] = np.bincount(output, minlength=self._size)
        self._index = {token: i for i, token in enumerate(distinct.tolist())}

    def advance(self, sequence: Sequence) -> None:
        """Counts the tokens appended since the last call."""
        for token in sequence.tokens[self._length :]:
            i = self._index.setdefault(token, self._size)
            if i == self._size:
                self._append(token)
            self._counts[i] += 1
        self._length = sequence.num_tokens

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token
        self._size += 1

    @property
    def entries(self) -> Entries:
        return self._ids[: self._size], self._counts[: self._size]


class Penalties:
    """Changes logits in place, all rows at once: penalties on the model's logits, then bias, then blocked ids."""

    def __init__(self, eos_token_ids: Sized[int]) -> None:
        self._eos = tuple(eos_token_ids)
        self._seen: dict[Sequence, Seen] = {}

    def apply(self, logits_SV: Tensor, sequences: Sized[Sequence]) -> None:
        """logits [S, V] fp32, row i is what follows sequences[i].tokens."""
        self._penalise(logits_SV, [(i, s) for i, s in enumerate(sequences) if _is_penalised(s)])
        self._add_bias(logits_SV, [(i, s) for i, s in enumerate(sequences) if s.params.logit_bias])
        for i, sequence in enumerate(sequences):
            if sequence.params.allowed_token_ids is not None:
                _allow(logits_SV[i], sequence.params.allowed_token_ids)
        self._block(logits_SV, [(i, s) for i, s in enumerate(sequences) if s.num_output < s.params.min_tokens])

    def _penalise(self, logits_SV: Tensor, rows: list[tuple[int, Sequence]]) -> None:
        """x' = (x / r if x > 0 else x · r) − presence · [c > 0] − frequency · c, for each token seen (r) c times."""
        seen = {sequence: self._seen.get(sequence) or Seen(sequence) for _, sequence in rows}
        self._seen = seen  # a sequence that left, or skips a step, is counted anew when it returns
        if not rows:
            return
        for sequence, counts in seen.items():
            counts.advance(sequence)
        index, ids, counts_M, repeated = _flatten(rows, [seen[s].entries for _, s in rows], logits_SV.device)
        params = [(s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty) for _, s in rows]
        repetition, presence, frequency = torch.tensor(params, device=logits_SV.device).T[:, repeated]
        x = logits_SV[index, ids]
        x = torch.where(x > 0, x / repetition, x * repetition)
        logits_SV[index, ids] = x - presence * (counts_M > 0) - frequency * counts_M

    def _add_bias(self, logits_SV: Tensor, rows: list[tuple[int, Sequence]]) -> None:
        if rows:
            biases = [s.params.logit_bias or {} for _, s in rows]
            entries = [(np.fromiter(b, np.int64), np.fromiter(b.values(), np.float32)) for b in biases]
            index, ids, values, _ = _flatten(rows, entries, logits_SV.device)
            logits_SV[index, ids] += values

    def _block(self, logits_SV: Tensor, rows: list[tuple[int, Sequence]]) -> None:
        if rows:
            stops = [np.array(sorted({*self._eos, *(s.params.stop_token_ids or ())}), np.int64) for _, s in rows]
            index, ids, *_ = _flatten(rows, [(ids, np.zeros(len(ids))) for ids in stops], logits_SV.device)
            logits_SV[index, ids] = BLOCKED


def _allow(logits_V: Tensor, allowed: list[int]) -> None:
    """Everything else has probability 0."""
    ids = torch.tensor(allowed, device=logits_V.device)
    kept = logits_V[ids]
    logits_V.fill_(BLOCKED)
    logits_V[ids] = kept


def _is_penalised(sequence: Sequence) -> bool:
    params = sequence.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _flatten(rows: list[tuple[int, Sequence]], entries: Sized[Entries], device: torch.device) -> tuple[Tensor, ...]:
    """Row index in the logits, token id, value, and index in `rows` of every entry, concatenated."""
    repeated = np.repeat(np.arange(len(rows)), [len(ids) for ids, *_ in entries])
    index = np.array([i for i, _ in rows])[repeated]
    ids, values = (np.concatenate(column) for column in zip(*entries, strict=True))
    return tuple(torch.from_numpy(array).to(device) for array in (index, ids, values, repeated))
