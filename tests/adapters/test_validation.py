"""validate(): every tensor belongs to a module that the config names and the base has, or the adapter is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.spec import LINEARS, AdapterError, AdapterInvalid, AdapterSpec, AdapterTooLarge, AdapterUnsupported
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from adapters.validation import Limits, validate
from tests.adapters.files import LIMITS, SHAPE, config, key, pairs, write


def check(directory: Path, tensors: Any, settings: Any, limits: Limits = LIMITS) -> AdapterSpec:
    return validate(write(directory, tensors, settings), SHAPE, limits)


def refused(directory: Path, tensors: Any, settings: Any, limits: Limits = LIMITS) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        check(directory, tensors, settings, limits)
    return caught.value


def test_every_tensor_belongs_to_a_module(tmp_path: Path) -> None:
    """AL-03: the status of a sound adapter counts all of its modules and tensors."""
    spec = check(tmp_path, pairs(), config())

    assert (len(spec.modules), spec.num_tensors, spec.rank, spec.warnings) == (14, 28, 4, ())
    assert spec.target_modules == LINEARS
    assert {module.scale for module in spec.modules} == {2.0}


@pytest.mark.parametrize(("use_rslora", "scale"), [(True, 8.0), (False, 2.0)])
def test_rslora_divides_by_the_root(tmp_path: Path, use_rslora: bool, scale: float) -> None:
    """AL-01: r=16, alpha=32 scales by 8 with use_rslora and by 2 without."""
    spec = check(tmp_path, pairs(rank=16), config(rank=16, lora_alpha=32, use_rslora=use_rslora))

    assert {module.scale for module in spec.modules} == {scale}


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.", "model.", "base_model.model.model.language_model.", "base_model.model.",
        "base_model.model.language_model.model.", "base_model.model._orig_mod.model.", "",
    ],
)  # fmt: skip
def test_known_key_prefixes_are_mapped(tmp_path: Path, prefix: str) -> None:
    """AL-03 (a, b, c): whatever wrapped the model in training, all modules are found."""
    assert len(check(tmp_path, pairs(prefix=prefix), config()).modules) == 14


def test_names_with_the_adapter_in_them_are_mapped(tmp_path: Path) -> None:
    """AL-03: a state dict that was saved without peft's help still says `.default.`."""
    tensors = {name.replace(".weight", ".default.weight"): tensor for name, tensor in pairs().items()}

    assert len(check(tmp_path, tensors, config()).modules) == 14


def test_names_that_fit_nothing_are_listed(tmp_path: Path) -> None:
    """AL-03 (d): half of the keys are nonsense: refused with their names, never loaded in part."""
    tensors = pairs(layers=[0]) | {f"zork.{name}": tensor for name, tensor in pairs(layers=[1]).items()}

    error = refused(tmp_path, tensors, config())

    assert error.code == "tensor_unknown"
    assert "zork.base_model" in error.message
    assert "more" in error.message


def test_two_kinds_of_prefix_are_refused(tmp_path: Path) -> None:
    """AL-03: one file comes from one model; a mixture may hold the same linear twice."""
    tensors = pairs(layers=[0]) | pairs(layers=[1], prefix="model.")
    twice = pairs() | pairs(layers=[1], prefix="model.")

    assert refused(tmp_path / "a", tensors, config()).code == "tensor_unknown"
    assert refused(tmp_path / "b", twice, config()).code == "tensor_duplicate"


def test_a_module_that_the_base_lacks_is_refused(tmp_path: Path) -> None:
    """AL-05: an adapter for modules that are not adapted here is refused, alone or in part."""
    shape = dataclasses.replace(SHAPE, linears={n: s for n, s in SHAPE.linears.items() if n != "down_proj"})
    for targets in (("down_proj",), ("q_proj", "down_proj")):
        with pytest.raises(AdapterInvalid) as caught:
            validate(write(tmp_path / targets[0], pairs(targets), config(targets)), shape, LIMITS)
        assert caught.value.code == "module_unknown"
        assert "down_proj" in caught.value.message


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj",), ("v_proj",), ("up_proj",), ("q_proj", "v_proj")])
def test_any_subset_of_linears_is_fine(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """AL-06: members of fused projections may be missing."""
    spec = check(tmp_path, pairs(targets), config(targets))

    assert spec.target_modules == targets


@pytest.mark.parametrize(
    ("extra", "settings", "code"),
    [
        (".lora_magnitude_vector", {}, "target_mismatch"),
        (".lora_magnitude_vector.weight", {}, "target_mismatch"),
        (".bias", {}, "target_mismatch"),
        (".base_layer.bias", {"bias": "all"}, "target_mismatch"),
        (".lora_B.bias", {}, "target_mismatch"),
        (".weight", {}, "unsupported_modules_to_save"),
        (".base_layer.weight", {}, "unsupported_modules_to_save"),
        (".something", {}, "tensor_unknown"),
    ],
)
def test_tensors_beyond_plain_lora_are_refused(tmp_path: Path, extra: str, settings: Any, code: str) -> None:
    """AL-08 (c), AL-26: a tensor that would be ignored is refused with the reason: the config's switch is off, or the
    base has no such part."""
    tensors = pairs() | {key(0, "q_proj") + extra: torch.ones(64)}

    assert refused(tmp_path, tensors, config(**settings)).code == code


def test_rank_of_tensors_and_config_must_agree(tmp_path: Path) -> None:
    """AL-09: both ranks and the module are named; a single module of another rank is found too."""
    error = refused(tmp_path / "a", pairs(rank=8), config(rank=16))
    one = pairs(rank=8) | {n: t for n, t in pairs(["v_proj"], [1], rank=16).items()}
    other = refused(tmp_path / "b", one, config(rank=8))

    assert error.code == other.code == "rank_mismatch"
    assert "rank 8" in error.message
    assert "16" in error.message
    assert other.param is not None
    assert "layers.1.self_attn.v_proj" in other.param


def test_rank_pattern_explains_mixed_ranks(tmp_path: Path) -> None:
    """Ranks may differ module by module, and each has its own scale."""
    tensors = pairs(rank=8) | pairs(["v_proj"], [1], rank=16)
    settings = config(rank=8, rank_pattern={"layers.1.self_attn.v_proj": 16}, alpha_pattern={"q_proj": 4})

    spec = check(tmp_path, tensors, settings)

    found = {(module.layer, module.module): (module.rank, module.scale) for module in spec.modules}
    assert found[1, "v_proj"] == (16, 0.5)
    assert found[0, "v_proj"] == (8, 1.0)
    assert found[1, "q_proj"] == (8, 0.5)


def test_over_rank_is_refused(tmp_path: Path) -> None:
    """AL-16: a rank above the limit never reaches an engine."""
    error = refused(tmp_path, pairs(rank=64), config(rank=64))

    assert isinstance(error, AdapterTooLarge)
    assert error.code == "rank_too_large"


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear", "ALL-LINEAR", [], None, list(LINEARS), [key(0, n, "model.") for n in LINEARS]
        + [key(1, n, "model.") for n in LINEARS], r".*_proj", r"model\.layers\.\d+\.(self_attn|mlp)\..*",
        r"^(?!.*vision).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*",
        [*LINEARS, "query_key_value", "c_attn"],
    ],
    ids=range(10),
)  # fmt: skip
def test_every_way_to_name_targets(tmp_path: Path, targets: Any) -> None:
    """AL-12: lists, paths, patterns and "all-linear" are understood; nothing is read letter by letter."""
    assert len(check(tmp_path, pairs(), config(targets)).modules) == 14


def test_one_string_names_a_module(tmp_path: Path) -> None:
    """AL-12: "q_proj" alone means that module; a pattern for one layer means that layer."""
    assert len(check(tmp_path / "a", pairs(["q_proj"]), config("q_proj")).modules) == 2
    pattern = r".*layers\.1\..*(q|v)_proj"
    assert len(check(tmp_path / "b", pairs(["q_proj", "v_proj"], [1]), config(pattern)).modules) == 2


def test_config_and_tensors_must_speak_of_the_same_modules(tmp_path: Path) -> None:
    """AL-12, AL-30: more in the file than in the config, or fewer, is refused and names the module."""
    more = refused(tmp_path / "a", pairs(["q_proj", "v_proj"]), config(("q_proj",)))
    fewer = refused(tmp_path / "b", pairs(["q_proj"]), config(("q_proj", "v_proj")))
    layer = refused(tmp_path / "c", pairs(layers=[0]), config())

    assert (more.code, fewer.code, layer.code) == ("target_mismatch", "tensor_missing", "tensor_missing")
    assert "v_proj" in more.message
    assert "v_proj" in fewer.message
    assert "layers.1." in layer.message


def test_layers_to_transform(tmp_path: Path) -> None:
    """AL-30: only the layers named are adapted; a tensor of another layer is refused; a pattern may say `layers`."""
    for pattern in (None, "layers", ["layers"], []):
        settings = config(layers_to_transform=[0], layers_pattern=pattern)
        assert {m.layer for m in check(tmp_path / "a", pairs(layers=[0]), settings).modules} == {0}
        assert refused(tmp_path / "b", pairs(layers=[0, 1]), settings).code == "target_mismatch"
    assert refused(tmp_path / "c", pairs(), config(layers_to_transform=1)).code == "target_mismatch"
    wrong = config(layers_to_transform=[0], layers_pattern="blocks")
    assert refused(tmp_path / "d", pairs(layers=[0]), wrong).code == "target_mismatch"


def test_exclude_modules(tmp_path: Path) -> None:
    """Excluded modules are not expected, and refused when they are there."""
    settings = config(exclude_modules=["layers.1.self_attn.q_proj"])
    tensors = {name: tensor for name, tensor in pairs().items() if key(1, "q_proj") not in name}

    assert len(check(tmp_path / "a", tensors, settings).modules) == 13
    assert refused(tmp_path / "b", pairs(), settings).code == "target_mismatch"
    assert len(check(tmp_path / "c", pairs(layers=[0]), config(exclude_modules=r".*layers\.1\..*")).modules) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floating_dtypes_are_accepted_mixed(tmp_path: Path, dtype: torch.dtype) -> None:
    """AL-19: A in one and B in another floating dtype."""
    tensors = {n: t.to(dtype) if "lora_A" in n else t.bfloat16() for n, t in pairs().items()}

    assert len(check(tmp_path, tensors, config()).modules) == 14


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int32])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """AL-19: integers, doubles and eight-bit floats are refused by name."""
    error = refused(tmp_path, pairs() | {f"{key(0, 'q_proj')}.lora_A.weight": torch.ones(4, 64).to(dtype)}, config())

    assert (error.code, isinstance(error, AdapterUnsupported)) == ("unsupported_dtype", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_must_be_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """AL-19: one NaN or infinity, anywhere, in any dtype, is found."""
    for position in (0, 255):
        bad = torch.ones(256)
        bad[position] = value
        name = f"{key(1, 'down_proj')}.lora_B.weight"
        error = refused(tmp_path, pairs() | {name: bad.reshape(64, 4).to(dtype)}, config())
        assert (error.code, error.param) == ("values_not_finite", name)


def test_values_must_fit_every_engine_dtype(tmp_path: Path) -> None:
    """AL-19: 1e6 overflows fp16, as does a B that only its scale makes too large; the largest fp16 is fine."""

    def one(value: float, side: str) -> dict[str, torch.Tensor]:
        tensors = pairs()
        tensors[f"{key(0, 'q_proj')}.lora_{side}.weight"].view(-1)[3] = value
        return tensors

    assert refused(tmp_path / "a", one(1e6, "A"), config()).code == "values_out_of_range"
    assert refused(tmp_path / "b", one(-65000.0, "B"), config()).code == "values_out_of_range"  # scaled by 2
    assert refused(tmp_path / "c", one(66000.0, "B"), config(lora_alpha=0.1)).code == "values_out_of_range"
    check(tmp_path / "d", one(65504.0, "A"), config())
    check(tmp_path / "e", one(1e-45, "B"), config())


def test_values_are_scanned_beyond_one_chunk(tmp_path: Path) -> None:
    """A tensor larger than the scanning buffer is looked at to its last element."""
    shape = dataclasses.replace(SHAPE, num_layers=1, linears={"q_proj": (64, 200_000)})
    a = torch.ones(16, 200_000)
    a[-1, -1] = float("nan")
    tensors = {f"{key(0, 'q_proj')}.lora_A.weight": a, f"{key(0, 'q_proj')}.lora_B.weight": torch.ones(64, 16)}
    directory = write(tmp_path, tensors, config(("q_proj",), rank=16))

    with pytest.raises(AdapterInvalid, match="NaN"):
        validate(directory, shape, LIMITS)


def test_a_has_its_b(tmp_path: Path) -> None:
    """AL-24: a lonely lora_A or lora_B is named."""
    for side in "AB":
        tensors = pairs()
        tensors.pop(f"{key(1, 'up_proj')}.lora_{side}.weight")
        error = refused(tmp_path / side, tensors, config())
        assert error.code == "tensor_missing"
        assert "layers.1.mlp.up_proj" in error.message


def test_shapes_must_fit_the_base(tmp_path: Path) -> None:
    """AL-23 (a), AL-24: another width, eight rows too many, a vector: the tensor and both shapes are named."""
    name = f"{key(1, 'down_proj')}.lora_B.weight"
    for index, tensor in enumerate((torch.ones(72, 4), torch.ones(64), torch.ones(64, 4, 1), torch.ones(64, 5))):
        error = refused(tmp_path / str(index), pairs() | {name: tensor}, config())
        assert (error.code, error.param) == ("shape_mismatch", name)
    assert refused(tmp_path / "z", pairs() | {name: torch.ones(0, 4)}, config()).code == "shape_mismatch"


def test_layers_beyond_the_base_are_refused(tmp_path: Path) -> None:
    """AL-23 (d): a layer index that the base doesn't have names the tensor."""
    tensors = pairs() | {n.replace("layers.1", "layers.2"): t for n, t in pairs(layers=[1]).items()}

    assert refused(tmp_path, tensors, config()).code == "layer_out_of_range"


@pytest.mark.parametrize(
    ("name", "has_warning"),
    [("tiny", False), ("org/Tiny", False), (None, False), ("", False), ("/home/u/tiny/", False), ("org/other", True)],
)
def test_another_base_name_is_a_warning(tmp_path: Path, name: str | None, has_warning: bool) -> None:
    """AL-23 (b, c): shapes decide; a different name is told in the status, a path or null is not."""
    spec = check(tmp_path, pairs(), config(base_model_name_or_path=name))

    assert bool(spec.warnings) == has_warning


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    """AL-21: safetensors win over a .bin beside them; a .bin alone or renamed is refused; nothing is executed."""
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (canary,))

    directory = write(tmp_path / "a", pairs(), config())
    (directory / "adapter_model.bin").write_bytes(pickle.dumps(Evil()))
    validate(directory, SHAPE, LIMITS)
    assert refused(tmp_path / "b", pickle.dumps(Evil()), config()).code == "weights_not_safetensors"
    (directory / WEIGHTS_FILE).unlink()
    with pytest.raises(AdapterInvalid) as caught:
        validate(directory, SHAPE, LIMITS)
    assert caught.value.code == "file_missing"
    assert not canary.exists()


def test_size_is_limited(tmp_path: Path) -> None:
    """A weights file above the limit is refused before its values are read."""
    error = refused(tmp_path, pairs(), config(), Limits(max_bytes=1000))

    assert (type(error), error.code) == (AdapterTooLarge, "weights_too_large")


def test_files_must_be_plain(tmp_path: Path) -> None:
    """AU-05: a link in the place of a file is not followed."""
    directory = write(tmp_path / "a", pairs(), config())
    (directory / CONFIG_FILE).rename(tmp_path / "elsewhere")
    (directory / CONFIG_FILE).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(AdapterInvalid) as caught:
        validate(directory, SHAPE, LIMITS)
    assert caught.value.code == "file_invalid"


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern", "layers_pattern"])
def test_bad_patterns_are_refused(tmp_path: Path, field: str) -> None:
    """A pattern that isn't a regular expression is a config error, not a crash."""
    value: Any = {"q_proj(": 4} if field == "rank_pattern" else "q_proj("
    error = refused(tmp_path, pairs(), config(**{field: value}) if field != "target_modules" else config(value))

    assert (error.code, error.param) == ("config_invalid", field)


def test_slow_patterns_are_refused(tmp_path: Path) -> None:
    """A pattern whose matching costs more than a fraction of a second never reaches an engine."""
    slow = "(?:" + ".*" * 7 + "Z|.*_proj)"
    started = time.monotonic()

    error = refused(tmp_path, pairs(), config(slow))

    assert error.code == "config_too_complex"
    assert time.monotonic() - started < 30


def test_hundreds_of_patterns_are_quick(tmp_path: Path) -> None:
    """rank_pattern with one entry per module, as rank-allocating methods write it, is looked up, not searched."""
    shape = dataclasses.replace(SHAPE, num_layers=64)
    tensors = pairs(layers=range(64), rank=2)
    names = [
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name
    ]
    settings = config(rank=8, rank_pattern=dict.fromkeys(names, 2), alpha_pattern=dict.fromkeys(names, 4))
    directory = write(tmp_path, tensors, settings)
    assert len(json.dumps(settings)) < 64 << 10

    spec = validate(directory, shape, LIMITS)

    assert {(module.rank, module.scale) for module in spec.modules} == {(2, 2.0)}
