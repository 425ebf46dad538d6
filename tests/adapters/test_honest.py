"""Adapters made by the installed peft: what people really train must load, and mean what peft means by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM

from adapters.loader import OFFSET_A, OFFSET_B, RANK, UNIT, PackedAdapter, load
from adapters.spec import LINEARS, AdapterUnsupported
from adapters.storage import WEIGHTS_FILE
from adapters.validation import Limits, validate
from tests.adapters.files import SHAPE

pytestmark = [  # of peft and transformers, about each other
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

PLAIN: list[dict[str, Any]] = [
    {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    {"r": 16, "lora_alpha": 32, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"r": 5, "lora_alpha": 7, "target_modules": "all-linear"},
    {"r": 2, "target_modules": r".*\.(gate|down)_proj"},
    {"r": 2, "target_modules": ["model.layers.1.self_attn.o_proj"]},
    {"r": 1, "target_modules": ["layers.0.mlp.up_proj", "self_attn.k_proj"]},
    {"r": 4, "target_modules": list(LINEARS), "layers_to_transform": [1]},
    {"r": 4, "target_modules": list(LINEARS), "layers_to_transform": 0, "layers_pattern": "layers"},
    {"r": 4, "target_modules": list(LINEARS), "exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"]},
    {"r": 4, "target_modules": "all-linear", "exclude_modules": r".*layers\.1\.mlp.*"},
    {"r": 4, "target_modules": list(LINEARS), "rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 2}},
    {"r": 4, "target_modules": list(LINEARS), "alpha_pattern": {r"layers\.0\..*": 32, "v_proj": 1}},
    {"r": 4, "target_modules": list(LINEARS), "use_rslora": True, "rank_pattern": {"^model.layers.0.mlp.down_proj": 9},
     "alpha_pattern": {"down_proj": 3}},
    {"r": 64, "lora_alpha": 128, "lora_dropout": 0.1, "target_modules": ["down_proj"]},
    {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False},
    {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": "mica"},
]  # fmt: skip


def trained(base: Path, settings: dict[str, Any]) -> PeftModel:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def deltas(packed: PackedAdapter) -> dict[str, torch.Tensor]:
    """What the packed adapter adds to each weight, by the module's name."""
    found = {}
    for layer in range(SHAPE.num_layers):
        for index, name in enumerate(LINEARS):
            row = packed.directory[layer, index]
            rank, (out_features, in_features) = int(row[RANK]), SHAPE.linears[name]
            if rank:
                a = packed.buffer[int(row[OFFSET_A]) * UNIT :][: rank * in_features].view(rank, in_features)
                b = packed.buffer[int(row[OFFSET_B]) * UNIT :][: rank * out_features].view(rank, out_features)
                found[f"layers.{layer}.{'mlp' if index > 3 else 'self_attn'}.{name}"] = b.T @ a
    return found


def peft_deltas(model: PeftModel) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("base_model.model.").removeprefix("model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


@pytest.mark.parametrize("settings", PLAIN, ids=range(len(PLAIN)))
def test_what_peft_saves_loads_and_is_equal(tmp_path: Path, tiny_llama: Path, settings: dict[str, Any]) -> None:
    """AL-01, AL-06, AL-30: every module's delta is peft's own, and no other module has one."""
    model = trained(tiny_llama, settings)
    model.save_pretrained(tmp_path)

    spec = validate(tmp_path, SHAPE, Limits())
    packed = load(tmp_path, SHAPE, torch.float32, max_rank=64)

    expected, found = peft_deltas(model), deltas(packed)
    assert found.keys() == expected.keys()
    assert len(found) == len(spec.modules)
    for name, delta in expected.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-5, atol=1e-5)


def test_adapters_of_headless_models_load(tmp_path: Path, tiny_llama: Path) -> None:
    """AL-03: an adapter trained on the bare model has other prefixes, and fits all the same."""
    model = get_peft_model(AutoModel.from_pretrained(tiny_llama), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    model.save_pretrained(tmp_path)

    assert len(validate(tmp_path, SHAPE, Limits()).modules) == 4


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"modules_to_save": ["v_proj"]}, "unsupported_modules_to_save"),
        ({"modules_to_save": ["mlp"]}, "unsupported_modules_to_save"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "unsupported_option"),
        ({"init_lora_weights": "pissa"}, "unsupported_init"),
        ({"init_lora_weights": "olora"}, "unsupported_init"),
        ({"velora_config": {"num_groups": 4}}, "unsupported_option"),
    ],
)
def test_what_peft_can_and_we_can_not_is_refused(
    tmp_path: Path, tiny_llama: Path, settings: dict[str, Any], code: str
) -> None:
    """AL-08, AL-10, AL-26: real files of options that we lack are refused by a stable code."""
    trained(tiny_llama, {"r": 4, "target_modules": ["q_proj"]} | settings).save_pretrained(tmp_path)

    with pytest.raises(AdapterUnsupported) as caught:
        validate(tmp_path, SHAPE, Limits())
    assert caught.value.code == code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_packing_rounds_as_torch_rounds(
    tmp_path: Path, tiny_llama: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    """AL-19: from any stored dtype to any engine dtype: A is cast, B is scaled in fp32 and then cast, bit for bit."""
    model = trained(tiny_llama, {"r": 3, "lora_alpha": 4, "target_modules": ["v_proj"]}).to(stored)
    model.save_pretrained(tmp_path)
    packed = load(tmp_path, SHAPE, dtype, max_rank=64)
    row = packed.directory[1, LINEARS.index("v_proj")]
    module = model.base_model.model.model.layers[1].self_attn.v_proj
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight

    start_a, start_b = int(row[OFFSET_A]) * UNIT, int(row[OFFSET_B]) * UNIT
    assert torch.equal(packed.buffer[start_a : start_a + 3 * 64].view(3, 64), a.to(dtype))
    assert torch.equal(packed.buffer[start_b : start_b + 3 * 32].view(3, 32), (b.float() * (4 / 3)).to(dtype).T)
    assert (tmp_path / WEIGHTS_FILE).stat().st_size > 0
