"""Adapters of every kind that PEFT makes, on tiny random bases, and what PEFT itself computes with each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from adapters.spec import LINEARS
from adapters.storage import WEIGHTS_FILE

VOCAB_SIZE = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "initializer_range": 0.15,
}  # fmt: skip
BASES = ("untied", "tied", "biased", "qwen3")
PROMPT = [3, 95, 17, 17, 4, 60, 88, 5, 31, 2, 77, 9, 14, 40, 41, 42, 43, 50, 66, 7]


@dataclass(frozen=True, eq=False)
class Case:
    """A LoraConfig for one of BASES, stored in `dtype`, with `num_added` new tokens."""

    base: str
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    num_added: int = 0

    @property
    def name(self) -> str:
        said = (f"{key}={value}" for key, value in self.settings.items() if key not in ("r", "lora_alpha"))
        added = [f"{self.num_added} new tokens"] * bool(self.num_added)
        return "-".join([self.base, *added, *said, str(self.dtype).removeprefix("torch.")])[:120]

    @property
    def prompt(self) -> list[int]:
        """PROMPT, with the new tokens at every fourth place."""
        if not self.num_added:
            return PROMPT
        return [VOCAB_SIZE + i % self.num_added if i % 4 == 3 else token for i, token in enumerate(PROMPT)]


QV = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
ALL = {"r": 3, "lora_alpha": 5, "target_modules": list(LINEARS)}
TABLES = {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "embed_tokens", "lm_head"]}
NORMS = ["norm", "input_layernorm", "post_attention_layernorm"]
DORA = {"use_dora": True}

CASES = (
    Case("untied", QV),
    Case("untied", ALL),
    Case("untied", QV, torch.float16),
    Case("untied", ALL, torch.bfloat16),
    Case("untied", ALL | {"use_rslora": True}),
    Case("untied", ALL | {"r": 2, "rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 5}}),
    Case("untied", ALL | {"alpha_pattern": {r"layers\.0\..*": 9, "v_proj": 1}}),
    Case("untied", QV | {"target_modules": "all-linear"}),
    Case("untied", QV | {"target_modules": r".*layers\.1\..*(gate|down)_proj"}),
    Case("untied", QV | {"target_modules": ["model.layers.1.self_attn.o_proj"]}),
    Case("untied", ALL | {"layers_to_transform": [1], "layers_pattern": "layers"}),
    Case("untied", ALL | {"exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"]}),
    Case("untied", ALL | DORA),
    Case("untied", QV | DORA),
    Case("untied", ALL | DORA, torch.bfloat16),
    Case("untied", ALL | DORA | {"use_rslora": True, "rank_pattern": {"q_proj": 7}}),
    Case("untied", TABLES),
    Case("untied", TABLES | DORA),
    Case("untied", TABLES | {"target_modules": ["embed_tokens"]}),
    Case("untied", TABLES | {"target_modules": ["lm_head"]}),
    Case("untied", TABLES | {"target_modules": r".*(embed_tokens|lm_head|q_proj)", "use_rslora": True}),
    Case("untied", TABLES | DORA | {"target_modules": ["lm_head", "down_proj"]}, torch.float16),
    Case("untied", QV | {"modules_to_save": ["lm_head"]}),
    Case("untied", QV | {"modules_to_save": ["embed_tokens"]}),
    Case("untied", QV | {"modules_to_save": ["lm_head", "embed_tokens", *NORMS]}),
    Case("untied", QV | {"modules_to_save": ["norm"]}),
    Case("untied", QV | DORA | {"modules_to_save": ["model.norm", "lm_head"]}),
    Case("untied", QV | {"trainable_token_indices": [95, 3, 17]}),
    Case("untied", QV | {"trainable_token_indices": {"embed_tokens": [4, 2], "lm_head": [9, 1, 5]}}),
    Case("untied", QV | DORA | {"trainable_token_indices": [60]}),
    Case("untied", QV | {"lora_bias": True}),
    Case("untied", ALL | {"lora_bias": True, "use_rslora": True}, torch.float16),
    Case("untied", TABLES | {"lora_bias": True, "target_modules": ["lm_head", "k_proj"]}),
    Case("tied", ALL),
    Case("tied", ALL | DORA),
    Case("tied", TABLES | {"target_modules": ["q_proj", "embed_tokens"]}),
    Case("tied", TABLES | DORA | {"target_modules": ["q_proj", "lm_head"]}),
    Case("tied", TABLES),
    Case("tied", TABLES | {"ensure_weight_tying": True, "target_modules": ["q_proj", "embed_tokens"]}),
    Case("tied", TABLES | {"ensure_weight_tying": True, "target_modules": ["q_proj", "lm_head"]}),
    Case("tied", QV | {"modules_to_save": ["embed_tokens"]}),
    Case("tied", QV | {"modules_to_save": ["lm_head"]}),
    Case("tied", QV | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    Case("tied", QV | {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    Case("tied", QV | {"trainable_token_indices": [17, 3, 88]}),
    Case("tied", QV | {"trainable_token_indices": {"embed_tokens": [50]}}, torch.bfloat16),
    *(
        Case(base, settings, num_added=count)
        for base in ("untied", "tied")
        for count, settings in (
            (3, QV),
            (1, QV | {"modules_to_save": ["embed_tokens", "lm_head"]}),
            (2, QV | {"modules_to_save": ["embed_tokens"]}),
            (2, QV | {"modules_to_save": ["lm_head"]}),
            (5, QV | {"trainable_token_indices": [3, 96, 100]}),
            (2, QV | {"trainable_token_indices": {"embed_tokens": [97, 3], "lm_head": [96]}}),
            (3, TABLES),
            (4, QV | DORA),
        )
    ),
    Case("tied", TABLES | {"target_modules": ["q_proj", "embed_tokens"]}, num_added=2),
    Case("untied", TABLES, torch.bfloat16, num_added=2),
    Case("biased", QV),
    Case("biased", QV | {"bias": "lora_only"}),
    Case("biased", QV | {"bias": "all"}),
    Case("biased", ALL | {"bias": "all"} | DORA),
    Case("biased", QV | {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]} | DORA),
    Case("biased", ALL | DORA),
    Case("biased", ALL | {"lora_bias": True}),
    Case("biased", ALL | {"lora_bias": True, "modules_to_save": NORMS}),
    Case("biased", QV | {"bias": "all", "modules_to_save": ["lm_head", "norm"]}, torch.float16),
    Case("biased", TABLES | {"bias": "all"} | DORA),
    Case("qwen3", ALL | DORA),
    Case("qwen3", QV | {"modules_to_save": ["q_norm", "k_norm"]}),
    Case("qwen3", TABLES | {"modules_to_save": ["norm"], "layers_to_transform": [0]}),
)


def make_base(directory: Path, name: str) -> Path:
    """Weights are bf16 numbers stored as fp32: what the engine reads as bf16 is exact."""
    torch.manual_seed(BASES.index(name))
    if name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    else:
        has_bias = name == "biased"
        tied = name == "tied"
        model = LlamaForCausalLM(
            LlamaConfig(**SIZES, tie_word_embeddings=tied, attention_bias=has_bias, mlp_bias=has_bias)
        )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(directory)
    return directory


def make_adapter(directory: Path, base: Path, case: Case) -> Path:
    """What peft saves, after something like training moved all that is trained."""
    with quiet():
        model = get_peft_model(
            _load(base, case.num_added), LoraConfig(task_type="CAUSAL_LM", **deepcopy(case.settings))
        )
        torch.manual_seed(len(case.name))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_magnitude_vector" in name:
                    parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
                elif "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
                elif parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(directory)
    tensors = {name: tensor.to(case.dtype) for name, tensor in load_file(directory / WEIGHTS_FILE).items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return directory


@torch.inference_mode()
def judge(base: Path, adapter: Path | None, tokens: list[int] = PROMPT, num_added: int = 0) -> Tensor:
    """[T, V] logits of the stored adapter on the stored base, by peft."""
    model = _load(base, num_added)
    with quiet():
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter).eval()
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].clone()


def _load(base: Path, num_added: int = 0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if num_added:
        with quiet():
            torch.manual_seed(num_added)
            model.resize_token_embeddings(model.config.vocab_size + num_added, mean_resizing=False)
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """peft and transformers warn about each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
