"""The Transformer gives the logits of transformers, for every family, whole or in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import load_model
from engine.ops import Ops, create_ops
from engine.ops.cpu import CpuOps
from engine.ops.native import NativeOps
from engine.ops.reference import ReferenceOps
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-gqa-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa-bias": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 2}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 24, "head_dim": 32}),
    "mistral-full": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"num_key_value_heads": 2, **QWEN_WINDOW}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen3-bias": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
}
PROMPT_LEN = 70
CHUNKS = ((0, 33), (33, 34), (34, 35), (35, 61), (61, 70))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Tensor]:
    """(checkpoint of a tiny random model, prompt, logits by transformers)."""
    import transformers

    name, changes = FAMILIES[request.param]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.2, attn_implementation="eager", **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():  # zeros and ones would hide mistakes
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    prompt = torch.randint(0, 199, (PROMPT_LEN,)).tolist()
    with torch.inference_mode():
        return path, prompt, model(torch.tensor([prompt])).logits[0]


def load(path: Path, ops: Ops) -> tuple[Transformer, KVCache]:
    config = ModelConfig.from_dir(path)
    return load_model(path, config, ops), KVCache(config, 64, BLOCK_SIZE, ops.weight_dtype)


@pytest.mark.parametrize("ops", [ReferenceOps(torch.float32), CpuOps(torch.float32)], ids=["ref", "cpu"])
def test_logits_equal_transformers(family: tuple[Path, list[int], Tensor], ops: Ops) -> None:
    """A whole prompt, and the same prompt in chunks and single tokens through paged KV: within 1e-4 everywhere."""
    path, prompt, wanted = family
    model, cache = load(path, ops)
    whole = make_sequence(prompt, [9, 3, 40, 7, 22])
    chunked = make_sequence(prompt, [1, 63, 2, 50, 5])

    (at_once,) = forward(model, cache, [Part(whole, 0, PROMPT_LEN)])
    in_parts = torch.cat([forward(model, cache, [Part(chunked, *chunk)])[0] for chunk in CHUNKS])

    assert (at_once - wanted).abs().max() <= 1e-4
    assert (in_parts - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("ops", [ReferenceOps(torch.float32), CpuOps(torch.float32)], ids=["ref", "cpu"])
def test_rows_of_a_mixed_batch_do_not_see_each_other(family: tuple[Path, list[int], Tensor], ops: Ops) -> None:
    """One step holds decodes of very different lengths, a first chunk and a later one: each as if alone."""
    path, prompt, wanted = family
    model, cache = load(path, ops)
    lengths = (2, 70, 17, 33, 16)
    sequences = [make_sequence(prompt, list(range(5 * row, 5 * row + 5))) for row in range(len(lengths) + 2)]
    forward(model, cache, [Part(s, 0, n - 1) for s, n in zip(sequences, lengths, strict=False)])
    forward(model, cache, [Part(sequences[5], 0, 20)])

    parts = [Part(s, n - 1, n) for s, n in zip(sequences, lengths, strict=False)]
    parts[2:2] = [Part(sequences[5], 20, 50), Part(sequences[6], 0, 37)]
    results = forward(model, cache, parts)

    for part, logits in zip(parts, results, strict=True):
        assert (logits - wanted[part.start : part.end]).abs().max() <= 1e-4


@pytest.mark.parametrize("chunk", [15, 16, 17, 64])
def test_chunk_borders_change_nothing(family: tuple[Path, list[int], Tensor], chunk: int) -> None:
    """KV-06: whatever the chunk, on and beside block borders, the last logits are those of the whole prompt."""
    path, prompt, wanted = family
    model, cache = load(path, create_ops("cpu", torch.float32, 16, 16))
    sequence = make_sequence(prompt, [4, 8, 15, 16, 23])

    for start in range(0, PROMPT_LEN, chunk):
        (logits,) = forward(model, cache, [Part(sequence, start, min(start + chunk, PROMPT_LEN))])

    assert (logits[-1] - wanted[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "ops", [CpuOps(torch.bfloat16), CpuOps(torch.float16), NativeOps()], ids=["bf16", "fp16", "native"]
)
def test_sixteen_bits_are_close(family: tuple[Path, list[int], Tensor], ops: Ops) -> None:
    """In 16 bits, logits stay within bf16's own noise of the fp32 ones."""
    path, prompt, wanted = family
    model, cache = load(path, ops)

    (logits,) = forward(model, cache, [Part(make_sequence(prompt, [1, 2, 3, 4, 5]), 0, PROMPT_LEN)])

    assert (logits - wanted).abs().mean() <= 0.02 * wanted.abs().mean() + 0.02


@pytest.mark.demo_model
def test_demo_model_equals_transformers(demo_model: Path) -> None:
    """The demo model in fp32: within 1e-5 · max|logit| + 2e-4, whole and in chunks with decodes."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    torch.manual_seed(0)
    prompt = torch.randint(0, oracle.config.vocab_size, (PROMPT_LEN,)).tolist()
    with torch.inference_mode():
        wanted = oracle(torch.tensor([prompt])).logits[0]
    model, cache = load(demo_model, create_ops("cpu", torch.float32, 16, 16))
    whole, chunked = make_sequence(prompt, [9, 3, 40, 7, 22]), make_sequence(prompt, [1, 63, 2, 50, 5])

    (at_once,) = forward(model, cache, [Part(whole, 0, PROMPT_LEN)])
    in_parts = torch.cat([forward(model, cache, [Part(chunked, *chunk)])[0] for chunk in CHUNKS])

    tolerance = 1e-5 * wanted.abs().max() + 2e-4
    assert (at_once - wanted).abs().max() <= tolerance
    assert (in_parts - wanted).abs().max() <= tolerance
