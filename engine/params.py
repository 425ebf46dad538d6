"""SamplingParams: how one request's tokens are chosen. Checks itself; knows no tokenizer, no HTTP, no torch."""

from __future__ import annotations

import math

import msgspec

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing logits by it would overflow, and the result is the argmax anyway."""


class ParamsError(ValueError):
    """A sampling parameter is out of its range. `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request; names and meanings are vLLM's and OpenAI's.

    temperature        0 (or < 1e-5) is greedy; ≤ 2
    top_k              keep the k likeliest tokens; 0 or -1 keeps all; above the vocabulary it is clamped
    top_p              keep the smallest set of tokens whose probabilities sum to ≥ top_p; in (0, 1]
    min_p              keep tokens with probability ≥ min_p × that of the likeliest; in [0, 1]
    max_tokens         tokens to produce at most; None = as many as the context has room for
    min_tokens         no end-of-sequence token and no stop token before so many tokens
    seed               64-bit; None = the engine draws one. Equal seeds, prompts and adapters give equal tokens in fp32
    stop               text that ends the output and is not part of it (str or up to 16 of them). Text-layer only
    stop_token_ids     ids that end the output; they count as completion tokens, their text is not shown
    ignore_eos         go on past end-of-sequence tokens
    n                  independent choices of one prompt
    logprobs           with each token, its logprob and those of the `logprobs` likeliest (0 = only its own)
    prompt_logprobs    the same for every prompt token (the first has none); switches the prefix cache off
    repetition_penalty > 0; divides/multiplies logits of tokens in prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty, frequency_penalty   −2 … 2, over output tokens (OpenAI)
    logit_bias         {token id: −100 … 100}, added to logits
    allowed_token_ids  only these are produced: an end-of-sequence token too only if it is among them
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Raises ParamsError naming the first parameter that is out of range."""
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParamsError("top_p", "must be in (0, 1]")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise ParamsError("repetition_penalty", "must be above 0")
        if self.top_k < -1:
            raise ParamsError("top_k", "must be -1 or 0 (all tokens) or positive")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParamsError("max_tokens", "must be at least 1")
        if self.min_tokens < 0:
            raise ParamsError("min_tokens", "must be at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamsError("min_tokens", "must not be above max_tokens")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ParamsError("seed", "must fit 64 bits")
        if not 1 <= self.n <= MAX_CHOICES:
            raise ParamsError("n", f"must be between 1 and {MAX_CHOICES}")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ParamsError(name, f"must be between 0 and {MAX_LOGPROBS}")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ParamsError("stop", f"at most {MAX_STOP_STRINGS} strings")
        if any(not text for text in self.stop_strings):
            raise ParamsError("stop", "must not be an empty string")
        if self.allowed_token_ids == []:
            raise ParamsError("allowed_token_ids", "must name at least one token")
        for bias in (self.logit_bias or {}).values():
            _in_range("logit_bias", bias, -100.0, 100.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ParamsError where a token id lies outside [0, vocab_size)."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if any(not 0 <= token < vocab_size for token in getattr(self, name) or ()):
                raise ParamsError(name, f"token ids must be in [0, {vocab_size})")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ParamsError(name, f"must be a number between {low:g} and {high:g}")
