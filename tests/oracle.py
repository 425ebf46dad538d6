"""Oracle: transformers + peft, one request at a time, fp32, no cache: what every answer of the engine must equal.

Adapters are applied by peft from the same files. A greedy answer is checked by teacher forcing: one forward pass over
prompt and answer, in which each token of the answer must be the likeliest one at its position. By induction that is the
same as comparing with the oracle's own greedy text, and it goes on where two tokens are so close that either is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

TIE = 1e-3
"""Logits closer than this may come in either order: the sums behind them are rounded in another order."""


class Oracle:
    """The checkpoint in `model` and any number of adapter directories, by name."""

    def __init__(self, model: Path, adapters: Mapping[str, Path] | None = None) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._peft: PeftModel | None = None
        for name, path in (adapters or {}).items():
            self.add(name, path)

    def add(self, name: str, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that will go
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(self._model, path, adapter_name=name).eval()
            else:
                self._peft.load_adapter(path, adapter_name=name)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], adapter: str | None) -> Tensor:
        """[T, V] of one sequence run alone."""
        ids = torch.tensor([list(tokens)])
        if adapter is not None:
            assert self._peft is not None
            self._peft.set_adapter(adapter, inference_mode=True)
            return self._peft(input_ids=ids, use_cache=False).logits[0]
        if self._peft is None:
            return self._model(input_ids=ids, use_cache=False).logits[0]
        with self._peft.disable_adapter():
            return self._peft(input_ids=ids, use_cache=False).logits[0]

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None) -> list[float]:
        """Of each token of the answer."""
        logits = self.logits([*prompt, *answer], adapter)[len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()

    def assert_greedy(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None, name: str = "") -> None:
        """Each token of the answer is the likeliest, or as likely as the likeliest within TIE."""
        logits = self.logits([*prompt, *answer], adapter)[len(prompt) - 1 : -1]
        lost = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        wrong = torch.nonzero(lost >= TIE)[:, 0].tolist()
        assert not wrong, f"{name}: token {wrong[0]} of {len(answer)} is {float(lost[wrong[0]]):.4f} below the best"
