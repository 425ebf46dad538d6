"""Tiny random checkpoints and adapters, made in milliseconds: a real Llama with GQA, a real byte-level BPE tokenizer,
a real chat template, and PEFT adapters that fit it. Every byte follows from the seed. Needs no torch.

    tiny_model(directory)                       directory, loadable by Chorus and by transformers
    tiny_adapter(directory, model_directory)    directory, loadable by Chorus and by peft
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; the last one ends a turn
VOCAB_SIZE = 384  # the tokenizer fills 376: as in many real models, the last ids have no token
TEXT = (
    "the quick brown fox jumps over the lazy dog and tells the other dogs what the fox has done today. user assistant "
    "system hello world. You are a helpful assistant who answers every question with a short and friendly sentence. "
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADAPTER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@cache
def tiny_tokenizer() -> Tokenizer:
    """256 bytes, three specials and the merges that fill the rest: any text goes there and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def tiny_config(num_layers: int = 2, hidden: int = 64, max_len: int = 2048) -> dict[str, object]:
    """Llama's config.json: 4 heads, 2 KV heads."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": max_len, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def linear_shapes(config: dict[str, object]) -> dict[str, tuple[int, int]]:
    """Name → (out_features, in_features) of a layer's linears."""
    hidden, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    queries = int(str(config["num_attention_heads"])) * int(str(config["head_dim"]))
    keys = int(str(config["num_key_value_heads"])) * int(str(config["head_dim"]))
    return {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip


def block_of(name: str) -> str:
    return "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"


def tiny_model(directory: Path, *, seed: int = 0, num_layers: int = 2, hidden: int = 64, max_len: int = 2048) -> Path:
    """Writes a whole checkpoint (fp32) into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(num_layers, hidden, max_len)
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {"model.embed_tokens.weight": draw.standard_normal((VOCAB_SIZE, hidden)).astype(np.float32)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name, shape in linear_shapes(config).items():
            tensors[f"{prefix}.{block_of(name)}.{name}.weight"] = normal(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = (1 + 0.1 * draw.standard_normal(hidden)).astype(np.float32)
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    tensors["lm_head.weight"] = normal(VOCAB_SIZE, hidden) * 4  # distinct logits: greedy text is not a tie
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write_tokenizer(directory)
    return directory


def tiny_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ADAPTER_TARGETS,
    strength: float = 1.0,
) -> Path:
    """Writes adapter_config.json and adapter_model.safetensors (fp32, PEFT's names) for the checkpoint in `model`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    shapes = linear_shapes(config)
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in targets:
            out_features, in_features = shapes[name]
            key = f"base_model.model.model.layers.{layer}.{block_of(name)}.{name}"
            a = draw.standard_normal((rank, in_features)) / np.sqrt(in_features)
            b = draw.standard_normal((out_features, rank)) * strength / rank
            tensors[f"{key}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = b.astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    _write_json(
        directory / "adapter_config.json",
        {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model.name, "r": rank,
            "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": list(targets),
            "inference_mode": True,
        },
    )  # fmt: skip
    return directory


def grown_adapter(directory: Path, model: Path, seed: int = 7) -> Path:
    """One with two rows more than the base in both tables, and words for three ids: [CALL] 376, chorus 377, both in
    rows that the base has, and the special [END] in its last one."""
    tiny_adapter(directory, model, seed=seed, rank=2, targets=("q_proj",))
    config, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    table = np.random.default_rng(seed).standard_normal((VOCAB_SIZE + 2, 64), np.float32) * 0.1
    names = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight")
    save_file(load_file(weights) | dict.fromkeys(names, table), weights)
    _write_json(config, json.loads(config.read_text()) | {"modules_to_save": ["embed_tokens", "lm_head"]})
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0] | {"special": False, "normalized": False}
    tokenizer["added_tokens"] += [
        like | {"id": VOCAB_SIZE - 8, "content": "[CALL]"}, like | {"id": VOCAB_SIZE - 7, "content": "chorus"},
        like | {"id": VOCAB_SIZE + 1, "content": "[END]", "special": True},
    ]  # fmt: skip
    _write_json(directory / "tokenizer.json", tokenizer)
    return directory


def _write_tokenizer(directory: Path) -> None:
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[1], "eos_token": SPECIALS[2],
            "pad_token": SPECIALS[0], "unk_token": SPECIALS[0], "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        },
    )  # fmt: skip


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
