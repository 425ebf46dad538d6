"""Adapters that change more than plain linears: what the config says and what the file holds must be the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.loader import HAS_BIAS, OFFSET_A, OFFSET_B, OFFSET_BIAS, RANK, UNIT, load
from adapters.spec import LINEARS, MODULES, NO_LAYER, AdapterError, AdapterInvalid, AdapterSpec, BaseShape
from adapters.storage import WEIGHTS_FILE
from adapters.validation import validate
from tests.adapters.files import LIMITS, PEFT_PREFIX, SHAPE, config, key, pairs, write

BIASED = dataclasses.replace(SHAPE, biases=("q_proj", "k_proj", "v_proj"))
EMBED, HEAD = f"{PEFT_PREFIX}embed_tokens", "base_model.model.lm_head"


def check(path: Path, extra: dict[str, Any], shape: BaseShape = SHAPE, **settings: Any) -> AdapterSpec:
    """Plain LoRA of q_proj, and something more."""
    settings = {"targets": ["q_proj"]} | settings
    return validate(write(path, pairs(["q_proj"]) | extra, config(**settings)), shape, LIMITS)


def refused(path: Path, extra: dict[str, Any], shape: BaseShape = SHAPE, **settings: Any) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        check(path, extra, shape, **settings)
    return caught.value


def vectors(part: str, names: tuple[str, ...] = ("q_proj",), layers: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return {
        f"{key(layer, name)}.{part}": torch.rand(SHAPE.linears[name][0]) + 0.5 for layer in layers for name in names
    }


def table(name: str, rows: int = 384) -> dict[str, Any]:
    return {f"{name}.weight": torch.randn(rows, 64)}


def embedding(rank: int = 4, rows: int = 384) -> dict[str, Any]:
    return {f"{EMBED}.lora_embedding_A": torch.ones(rank, rows), f"{EMBED}.lora_embedding_B": torch.ones(64, rank)}


@pytest.mark.parametrize("suffix", ["", ".weight", ".default", ".default.weight"])
def test_dora_has_a_magnitude_for_every_linear(tmp_path: Path, suffix: str) -> None:
    """AL-08 (a, b): all magnitudes are found whatever their spelling; a missing one is named, never taken for LoRA."""
    part = f"lora_magnitude_vector{suffix}"
    spec = check(tmp_path / "a", vectors(part), use_dora=True)
    error = refused(tmp_path / "b", vectors(part, layers=(0,)), use_dora=True)

    assert [module.magnitude for module in spec.modules] == list(vectors(part))
    assert error.code == "tensor_missing"
    assert "layers.1.self_attn.q_proj" in (error.param or "")
    lonely = refused(tmp_path / "c", vectors(part, ("q_proj", "v_proj")), use_dora=True)
    assert lonely.code == "tensor_missing"
    assert "v_proj" in lonely.message


def test_biases_are_those_that_the_config_names(tmp_path: Path) -> None:
    """AL-26: lora_only means those of adapted linears, all means all; fewer or more are refused, and so is a bias that
    the base lacks."""
    only, every = vectors("base_layer.bias"), vectors("bias", ("q_proj", "k_proj", "v_proj"))

    assert {m.module for m in check(tmp_path / "a", only, BIASED, bias="lora_only").modules if m.bias} == {"q_proj"}
    assert len(check(tmp_path / "b", every, BIASED, bias="all").modules) == 6
    for index, (tensors, bias, code) in enumerate(
        (
            (only, "none", "target_mismatch"), (only, "all", "tensor_missing"), (every, "lora_only", "target_mismatch"),
            ({}, "lora_only", "tensor_missing"), (vectors("bias", ("o_proj",)) | every, "all", "target_mismatch"),
        )
    ):  # fmt: skip
        assert refused(tmp_path / str(index), tensors, BIASED, bias=bias).code == code
    assert (
        refused(tmp_path / "s", {k: v[:3] for k, v in only.items()}, BIASED, bias="lora_only").code == "shape_mismatch"
    )
    assert check(tmp_path / "n", {}, SHAPE, bias="all").num_tensors == 4  # this base has none


def test_lora_bias_is_scaled_and_kept(tmp_path: Path) -> None:
    """AL-26: the bias of lora_B is stored as it is added: times alpha/r."""
    tensors = vectors("lora_B.bias")
    check(tmp_path / "a", tensors, lora_bias=True)

    packed = load(tmp_path / "a", SHAPE, torch.bfloat16, 16)

    row = packed.directory[1, LINEARS.index("q_proj")]
    start = int(row[OFFSET_BIAS]) * UNIT
    assert int(row[3]) == HAS_BIAS
    shift = packed.buffer[start : start + 2 * 64].view(torch.float32)
    assert torch.equal(shift, 2 * tensors[f"{key(1, 'q_proj')}.lora_B.bias"])
    assert refused(tmp_path / "b", {}, lora_bias=True).code == "tensor_missing"


def test_tables_can_be_adapted(tmp_path: Path) -> None:
    """LoRA on embed_tokens and lm_head stands in the directory's last row, and must be named by the config."""
    head = {f"{HEAD}.lora_A.weight": torch.ones(4, 64), f"{HEAD}.lora_B.weight": torch.ones(384, 4)}
    spec = check(tmp_path / "a", embedding() | head, targets=["q_proj", "embed_tokens", "lm_head"])

    assert [m.module for m in spec.modules if m.layer == NO_LAYER] == ["embed_tokens", "lm_head"]
    packed = load(tmp_path / "a", SHAPE, torch.bfloat16, 16)
    assert packed.size_bytes == spec.packed_bytes
    assert packed.directory[2, MODULES.index("lm_head"), RANK] == 4
    assert refused(tmp_path / "b", embedding()).code == "target_mismatch"
    assert refused(tmp_path / "c", {}, targets=["q_proj", "lm_head"]).code == "tensor_missing"
    assert refused(tmp_path / "d", {}, targets=["q_proj", "embed_tokens"]).code == "tensor_missing"
    half = {name: tensor for name, tensor in embedding().items() if "_B" in name}
    assert refused(tmp_path / "e", half, targets=["q_proj", "embed_tokens"]).code == "tensor_missing"
    assert refused(tmp_path / "f", embedding(64), targets=["q_proj", "embed_tokens"]).code == "rank_mismatch"


def test_whole_modules_are_those_that_the_config_names(tmp_path: Path) -> None:
    """AL-10: modules_to_save holds norms and tables, all that PEFT would mean by its names; others are refused."""
    norms = {f"{PEFT_PREFIX}norm.weight": torch.ones(64)} | {
        f"{PEFT_PREFIX}layers.{layer}.{name}.weight": torch.ones(64)
        for layer in (0, 1)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    spec = check(tmp_path / "a", norms | table(HEAD), modules_to_save=["norm", "lm_head"])

    assert sum(bool(module.weight) for module in spec.modules) == 6
    first = dict(list(norms.items())[:1])
    assert refused(tmp_path / "b", first, modules_to_save=["norm"]).code == "tensor_missing"
    assert len(check(tmp_path / "c", first, modules_to_save=["model.norm"]).modules) == 3
    assert refused(tmp_path / "d", first).code == "target_mismatch"
    assert refused(tmp_path / "e", {}, modules_to_save=["embed_tokens"]).code == "tensor_missing"
    assert refused(tmp_path / "f", {}, modules_to_save=["v_proj"]).code == "unsupported_modules_to_save"
    both = embedding() | table(EMBED)
    error = refused(tmp_path / "g", both, targets=["q_proj", "embed_tokens"], modules_to_save=["embed_tokens"])
    assert error.code == "target_mismatch"
    assert len(check(tmp_path / "h", {}, modules_to_save=["classifier", "score"]).modules) == 2


def test_new_tokens_need_rows_everywhere(tmp_path: Path) -> None:
    """Rows of new tokens in one table but not in the other, or without what they are added to, have their own code."""
    for index, (tensors, settings) in enumerate(
        (
            (table(HEAD, 385), {"modules_to_save": ["lm_head"]}),
            (table(EMBED, 400), {"modules_to_save": ["embed_tokens"]}),
            (embedding(rows=390), {"targets": ["q_proj", "embed_tokens"]}),
            ({f"{EMBED}.token_adapter.trainable_tokens_delta": torch.ones(1, 64)}, {"trainable_token_indices": [384]}),
        )
    ):
        assert refused(tmp_path / str(index), tensors, **settings).code == "unsupported_vocabulary"
    smaller = refused(tmp_path / "s", table(HEAD, 100), modules_to_save=["lm_head"])
    assert smaller.code == "shape_mismatch"
    uneven = refused(tmp_path / "u", table(HEAD, 399) | table(EMBED, 400), modules_to_save=["embed_tokens", "lm_head"])
    assert uneven.code == "shape_mismatch"
    assert refused(tmp_path / "c", table(EMBED, 400) | table(HEAD, 400)).code == "base_unknown"
    both = check(tmp_path / "b", table(HEAD, 400) | table(EMBED, 400), modules_to_save=["embed_tokens", "lm_head"])
    assert both.num_added == 16


def test_a_table_saved_twice_must_be_the_same_twice(tmp_path: Path) -> None:
    """PEFT writes a replaced table under two names when the vocabulary has grown; two that differ are refused."""
    rows = torch.randn(384, 64)
    tensors = {f"{HEAD}.weight": rows, f"{HEAD}.modules_to_save.weight": rows.clone()}

    spec = check(tmp_path / "a", tensors, modules_to_save=["lm_head"])

    assert [module.weight for module in spec.modules if module.module == "lm_head"] == [f"{HEAD}.weight"]
    tensors[f"{HEAD}.modules_to_save.weight"][383, 63] += 1
    error = refused(tmp_path / "b", tensors, modules_to_save=["lm_head"])
    assert error.code == "tensor_duplicate"


def test_single_tokens(tmp_path: Path) -> None:
    """Rows of single tokens are kept in the order of their ids; of a tied base, the head gets them too."""
    rows = torch.randn(3, 64)
    tensors = {f"{EMBED}.token_adapter.trainable_tokens_delta": rows}
    tied = dataclasses.replace(SHAPE, tie_word_embeddings=True)

    assert len(check(tmp_path / "a", tensors, trainable_token_indices=[9, 383, 2]).modules) == 3
    assert len(check(tmp_path / "b", tensors, tied, trainable_token_indices=[9, 383, 2]).modules) == 4
    packed = load(tmp_path / "a", SHAPE, torch.float32, 16)
    row = packed.directory[NO_LAYER, MODULES.index("embed_tokens")]
    ids = packed.buffer[int(row[OFFSET_B]) * UNIT :][: 3 * 2].view(torch.int64)
    assert ids.tolist() == [2, 9, 383]
    assert torch.equal(packed.buffer[int(row[OFFSET_A]) * UNIT :][: 3 * 64].view(3, 64), rows[[2, 0, 1]])
    assert refused(tmp_path / "c", tensors, trainable_token_indices=[9]).code == "shape_mismatch"
    assert refused(tmp_path / "d", tensors).code == "target_mismatch"
    assert refused(tmp_path / "e", {}, trainable_token_indices=[9]).code == "tensor_missing"


@pytest.fixture
def base(tiny_llama: Path) -> BaseShape:
    return dataclasses.replace(SHAPE, weights_dir=str(tiny_llama))


def test_copies_of_the_base_are_dropped_and_counted(tmp_path: Path, tiny_llama: Path, base: BaseShape) -> None:
    """What PEFT saves beside adapted tables is compared with the base in any dtype: equal copies take no memory."""
    own = load_file(tiny_llama / "model.safetensors")
    copies = {
        f"{EMBED}.base_layer.weight": own["model.embed_tokens.weight"].bfloat16(),
        f"{HEAD}.weight": own["lm_head.weight"].clone(),
    }
    settings = {"targets": ["q_proj", "embed_tokens"]}

    plain = check(tmp_path / "a", embedding(), base, **settings)
    spec = check(tmp_path / "b", embedding() | copies, base, **settings)

    assert (spec.modules, spec.packed_bytes) == (plain.modules, plain.packed_bytes)
    assert spec.num_tensors == plain.num_tensors + 2
    assert "2 copies" in spec.warnings[-1]


def test_copies_of_another_base_are_refused(tmp_path: Path, tiny_llama: Path, base: BaseShape) -> None:
    """One changed number is found and the tensor named; without the base's weights at hand nothing is believed."""
    changed = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    changed[-1, -1] += 0.01
    copies = {f"{EMBED}.base_layer.weight": changed}
    settings: dict[str, Any] = {"targets": ["q_proj", "embed_tokens"]}

    error = refused(tmp_path / "a", embedding() | copies, base, **settings)

    assert (error.code, error.param) == ("base_changed", f"{EMBED}.base_layer.weight")
    assert refused(tmp_path / "b", embedding() | copies, SHAPE, **settings).code == "base_unknown"
    gone = dataclasses.replace(SHAPE, weights_dir=str(tmp_path))
    assert refused(tmp_path / "c", embedding() | copies, gone, **settings).code == "base_unknown"


def test_copies_are_looked_up_in_shards(tmp_path: Path, tiny_llama: Path) -> None:
    """A base in several files, with a head that is tied to its embedding."""
    table = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    save_file({"model.embed_tokens.weight": table}, tmp_path / "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.embed_tokens.weight": "two.safetensors"}}'
    )
    tied = dataclasses.replace(SHAPE, weights_dir=str(tmp_path), tie_word_embeddings=True)

    assert check(tmp_path / "a", {f"{HEAD}.weight": table.half()}, tied).num_tensors == 5
    assert refused(tmp_path / "b", {f"{HEAD}.weight": table + 1}, tied).code == "base_changed"


def test_fused_projections_are_split(tmp_path: Path) -> None:
    """AL-28: qkv_proj and gate_up_proj become the base's own linears: the same A, and each its rows of B, magnitude."""
    fused = {"self_attn.qkv_proj": (128, ("q_proj", "k_proj", "v_proj")), "mlp.gate_up_proj": (256, LINEARS[4:6])}
    tensors: dict[str, Any] = {}
    for layer in (0, 1):
        for name, (outputs, _) in fused.items():
            stem = f"{PEFT_PREFIX}layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, 64)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, 4)
    settings = config(["qkv_proj", "gate_up_proj"])
    spec = validate(write(tmp_path, tensors, settings), SHAPE, LIMITS)

    packed = load(tmp_path, SHAPE, torch.float32, 16)

    assert (len(spec.modules), spec.num_tensors) == (10, 8)
    for name, (_, members) in fused.items():
        first = 0
        whole = tensors[f"{PEFT_PREFIX}layers.1.{name}.lora_B.weight"]
        for member in members:
            row, outputs = packed.directory[1, LINEARS.index(member)], SHAPE.linears[member][0]
            b = packed.buffer[int(row[OFFSET_B]) * UNIT :][: 4 * outputs].view(4, outputs)
            assert torch.equal(b.t(), whole[first : first + outputs] * 2)
            first += outputs
        assert first == len(whole)


def test_fused_and_split_names_of_one_module(tmp_path: Path) -> None:
    """AL-28: a module is adapted once; a fused one with rows missing, or of a layout that we don't know, is refused."""
    stem = f"{PEFT_PREFIX}layers.0.self_attn.qkv_proj"
    fused = {f"{stem}.lora_A.weight": torch.ones(4, 64), f"{stem}.lora_B.weight": torch.ones(128, 4)}
    assert refused(tmp_path / "a", fused, targets=["q_proj", "qkv_proj"]).code == "tensor_duplicate"
    short = fused | {f"{stem}.lora_B.weight": torch.ones(96, 4)}
    names = {"layers_to_transform": [0]}
    for tensors, code in ((short, "shape_mismatch"), (fused, "")):
        path = write(tmp_path / f"b{code}", tensors, config(["qkv_proj"], **names))
        if code:
            with pytest.raises(AdapterInvalid) as caught:
                validate(path, SHAPE, LIMITS)
            assert caught.value.code == code
        else:
            assert len(validate(path, SHAPE, LIMITS).modules) == 3
    other = {f"{PEFT_PREFIX}layers.0.self_attn.query_key_value.lora_A.weight": torch.ones(4, 64)}
    assert refused(tmp_path / "c", other).code == "unsupported_fused"


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"])
def test_wrappers_inside_names_mean_nothing(tmp_path: Path, wrapper: str) -> None:
    """AL-03: what wraps a layer in training stays in its tensors' names, and is read over."""
    tensors = {name.replace("layers.1.", f"layers.1.{wrapper}."): tensor for name, tensor in pairs().items()}

    assert len(validate(write(tmp_path, tensors, config()), SHAPE, LIMITS).modules) == 14


def test_a_file_without_lora_is_refused(tmp_path: Path) -> None:
    """No adapter is ready that adapts nothing."""
    path = write(tmp_path, table(HEAD), config([], modules_to_save=["lm_head"]))

    with pytest.raises(AdapterInvalid, match="no lora_A"):
        validate(path, SHAPE, LIMITS)


def test_a_header_of_640_bytes_is_no_pickle(tmp_path: Path) -> None:
    """AL-21: the length of an honest header may begin with the bytes of a pickle."""
    write(tmp_path, pairs(["q_proj"]), config(["q_proj"]))
    data = (tmp_path / WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    for wanted in (0x280, 0x380, 0x480, 0x580):
        if wanted >= length:
            header = data[8 : 8 + length] + b" " * (wanted - length)
            (tmp_path / WEIGHTS_FILE).write_bytes(wanted.to_bytes(8, "little") + header + data[8 + length :])
            assert validate(tmp_path, SHAPE, LIMITS).num_tensors == 4
