"""ModelRunner: a Step becomes tokens: lay out, compute, choose. Knows no policy, no request and no text."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchBuilder, ForwardBatch
from engine.kv_cache import KVCache
from engine.kv_host import HostMemory
from engine.lora import LoraBank
from engine.model.transformer import Transformer
from engine.protocol import TokenLogprobs
from engine.sampler import Sampler, token_logprobs
from engine.step import Row, Sampled, Step

LOGIT_ROWS = 64
"""Rows of prompt logits that are held at once: a long prompt's would need gigabytes."""


class ModelRunner:
    """The Runner of a real model: one forward pass per step, and one transfer of ids at its end."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        bank: LoraBank | None,
        sampler: Sampler,
        device: torch.device | str,
        host: HostMemory | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._builder = BatchBuilder(bank, cache.block_size, device)
        self._sampler = sampler
        self._host = host

    @torch.inference_mode()
    def run(self, step: Step) -> list[Sampled]:
        """One Sampled per row, in the order of the rows. Every adapter of the step is resident in the bank."""
        self._copy(step)
        if not step.rows:
            return []
        batch = self._builder.build(step)
        hidden_TH = self._model.forward(batch, self._cache)
        prompt = self._prompt_logprobs(step.rows, batch, hidden_TH)
        chosen = iter(self._sample(step.rows, batch, hidden_TH))
        return [_with_prompt(next(chosen) if row.samples else Sampled(None), prompt.get(row)) for row in step.rows]

    def _copy(self, step: Step) -> None:
        if self._host is not None:
            self._host.store(step.stores)
        self._cache.copy_blocks(step.copies)
        if self._host is not None:
            self._host.load(step.loads)

    def _sample(self, rows: tuple[Row, ...], batch: ForwardBatch, hidden_TH: Tensor) -> list[Sampled]:
        lasts = [end - 1 for row, end in zip(rows, accumulate(batch.logit_counts), strict=True) if row.samples]
        if not lasts:
            return []
        logits_SV = self._model.logits(hidden_TH, batch, batch.logit_rows[lasts])
        return self._sampler.sample(logits_SV, [row.sequence for row in rows if row.samples])

    def _prompt_logprobs(
        self, rows: tuple[Row, ...], batch: ForwardBatch, hidden_TH: Tensor
    ) -> dict[Row, list[TokenLogprobs]]:
        """Entry j of a row belongs to prompt token row.start + j + 1."""
        found: dict[Row, list[TokenLogprobs]] = {}
        for row, count, end in zip(rows, batch.logit_counts, accumulate(batch.logit_counts), strict=True):
            num_top = row.sequence.params.prompt_logprobs
            if num_top is None:
                continue
            wanted = batch.logit_rows[end - count : end - row.samples]
            targets = np.array(row.sequence.tokens[row.start + 1 : row.start + 1 + len(wanted)], np.int64)
            found[row] = [
                entry
                for first in range(0, len(wanted), LOGIT_ROWS)
                for entry in token_logprobs(
                    self._model.logits(hidden_TH, batch, wanted[first : first + LOGIT_ROWS]),
                    targets[first : first + LOGIT_ROWS],
                    num_top,
                )
            ]
        return found


def _with_prompt(sampled: Sampled, prompt_logprobs: list[TokenLogprobs] | None) -> Sampled:
    return sampled if prompt_logprobs is None else Sampled(sampled.token_id, sampled.logprobs, prompt_logprobs)
