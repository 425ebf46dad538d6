"""Is it sound: does the config agree with the tensors, do these fit the base, are the values finite. numpy, no torch.

    inspect(directory, …)                 config and header only: milliseconds; what the loader asks too
    validate(directory, …)                that, and a look at every value
    validate_in_subprocess(directory, …)  the same in a child with bounded memory and time (adapters/sandbox.py)

Tensors decide what is applied and the config must agree: a tensor that the config doesn't speak of is refused, and so
is a module that it names and the file lacks. Which base an adapter was trained for is decided by shapes; another name
than ours in base_model_name_or_path is a warning, because the same model goes by many names and paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn

from adapters.config import MAX_CONFIG_BYTES, LoraConfig, parse_config
from adapters.header import Tensor, open_regular, read_header
from adapters.spec import (
    LINEARS,
    AdapterInvalid,
    AdapterSpec,
    AdapterTooLarge,
    AdapterUnsupported,
    BaseShape,
    ModuleSpec,
    packed_elements,
    shown,
)
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE
from adapters.targets import Targets
from adapters.values import check_values

_KEY = re.compile(
    r"(?P<prefix>(?:(?:base_model|model|language_model|module|_orig_mod)\.)*)layers\.(?P<layer>\d{1,5})\."
    r"(?:self_attn\.(?P<attn>[qkvo]_proj)|mlp\.(?P<mlp>(?:gate|up|down)_proj))\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
_REASONS: tuple[tuple[str, str, str], ...] = (
    (r"lora_magnitude_vector", "unsupported_dora", "DoRA is not supported"),
    (r"lora_embedding_|embed_tokens|lm_head", "unsupported_embedding", "embeddings and lm_head can't be adapted"),
    (r"\.bias$", "unsupported_bias", "biases are not supported"),
    (r"(qkv|gate_up|[wW]qkv|query_key_value)(_proj)?\.", "unsupported_fused", "fused linears are not supported"),
    (r"modules_to_save|base_layer|norm\.weight$", "unsupported_modules_to_save", "whole modules are not supported"),
)
"""What a tensor that isn't plain LoRA tells us: pattern, code, message."""


@dataclass(frozen=True)
class Limits:
    """What an adapter may cost. `max_bytes` is of the weights file; the last three bound the subprocess."""

    max_rank: int = 64
    max_bytes: int = 1 << 30
    max_header_bytes: int = 4 << 20
    memory_bytes: int = 1 << 30
    cpu_s: int = 60
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Inspected:
    """A spec, and where its tensors lie in the weights file."""

    spec: AdapterSpec
    tensors: dict[str, Tensor]


def validate(directory: Path, shape: BaseShape, limits: Limits) -> AdapterSpec:
    """The whole check, in this process. Raises AdapterError; returns what the adapter is."""
    with open_regular(directory / WEIGHTS_FILE) as file:
        found = inspect(directory, file, shape, limits)
        check_values(file, found.tensors, {module.tensor_b: module.scale for module in found.spec.modules})
    return found.spec


async def validate_in_subprocess(directory: Path, shape: BaseShape, limits: Limits) -> AdapterSpec:
    """The same in a child process without our environment, with bounded memory and time."""
    from adapters.sandbox import run  # sandbox builds on this module

    return await run(directory, shape, limits)


def inspect(directory: Path, weights: FileIO, shape: BaseShape, limits: Limits) -> Inspected:
    """What the config and the header of the open weights file say, checked against each other and the base."""
    with open_regular(directory / CONFIG_FILE) as file:
        config = parse_config(file.read(MAX_CONFIG_BYTES + 1))
    tensors = read_header(weights, limits.max_header_bytes)
    if tensors[-1].end > limits.max_bytes:
        raise AdapterTooLarge(
            "weights_too_large", f"the weights have {tensors[-1].end} bytes, at most {limits.max_bytes} are allowed"
        )
    pairs = _pair(tensors)
    targets = Targets(config)
    _check_agreement(pairs, targets, shape)
    modules = tuple(_module(pair, config, targets, shape, limits) for pair in pairs)
    spec = AdapterSpec(
        modules=modules,
        rank=max(module.rank for module in modules),
        target_modules=tuple(name for name in LINEARS if any(module.module == name for module in modules)),
        num_tensors=len(tensors),
        packed_bytes=2 * packed_elements(modules, shape),
        base_model=None if config.base_model is None else shown(config.base_model),
        warnings=config.warnings + _base_warnings(config, shape),
    )
    return Inspected(spec, {tensor.name: tensor for tensor in tensors})


@dataclass(frozen=True)
class _Pair:
    """A and B of one linear; `key` is the linear's name in the model that was trained."""

    layer: int
    module: str
    key: str
    a: Tensor
    b: Tensor


def _pair(tensors: list[Tensor]) -> list[_Pair]:
    """Every tensor belongs to a pair, all under one prefix. In the order of (layer, module)."""
    sides: dict[tuple[int, int], dict[str, Tensor]] = {}
    keys: dict[tuple[int, int], str] = {}
    prefixes: dict[str, str] = {}
    unknown = []
    for tensor in tensors:
        match = _KEY.fullmatch(tensor.name)
        if match is None:
            unknown.append(tensor.name)
            continue
        prefixes.setdefault(match["prefix"], tensor.name)
        place = (int(match["layer"]), LINEARS.index(match["attn"] or match["mlp"]))
        pair = sides.setdefault(place, {})
        if match["side"] in pair:
            _invalid(
                "tensor_duplicate", f"{shown(tensor.name)} and {shown(pair[match['side']].name)} are the same", tensor
            )
        pair[match["side"]] = tensor
        keys[place] = tensor.name[: tensor.name.index(".lora_")]
    if unknown:
        _refuse(unknown)
    if len(prefixes) > 1:
        first, second = list(prefixes.values())[:2]
        raise AdapterInvalid("tensor_unknown", f"names of two kinds: {shown(first)} and {shown(second)}", second)
    return [_whole(place, keys[place], sides[place]) for place in sorted(sides)]


def _whole(place: tuple[int, int], key: str, sides: dict[str, Tensor]) -> _Pair:
    if len(sides) < 2:
        (side,), (tensor,) = sides.keys(), sides.values()
        missing = "B" if side == "A" else "A"
        _invalid("tensor_missing", f"{shown(tensor.name)} has no lora_{missing}", tensor)
    path = key.removeprefix("base_model.").removeprefix("model.") if key.startswith("base_model.") else key
    return _Pair(place[0], LINEARS[place[1]], path, sides["A"], sides["B"])


def _refuse(names: list[str]) -> NoReturn:
    for pattern, code, reason in _REASONS:
        for name in names:
            if re.search(pattern, name):
                raise AdapterUnsupported(code, f"{reason}: {_listed(names)}", name)
    raise AdapterInvalid("tensor_unknown", f"tensors that fit no linear of the base: {_listed(names)}", names[0])


def _listed(names: Iterable[str], most: int = 5) -> str:
    every = [shown(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _invalid(code: str, message: str, tensor: Tensor) -> NoReturn:
    raise AdapterInvalid(code, message, tensor.name)


def _check_agreement(pairs: list[_Pair], targets: Targets, shape: BaseShape) -> None:
    """The modules of the file are those that the config names: none more, none fewer."""
    example = pairs[0]
    root = example.key[: example.key.index("layers.")]
    for pair in pairs:
        if pair.layer >= shape.num_layers:
            _invalid("layer_out_of_range", f"{shown(pair.a.name)}: the base has {shape.num_layers} layers", pair.a)
        if pair.module not in shape.linears:
            _invalid("module_unknown", f"{shown(pair.a.name)}: the base has no {pair.module}", pair.a)
        if not targets.covers(pair.key, pair.layer):
            _invalid("target_mismatch", f"{shown(pair.a.name)} is not among what adapter_config.json targets", pair.a)
    for name in ("lm_head", f"{root}embed_tokens"):
        if targets.names(name):
            raise AdapterUnsupported("unsupported_embedding", f"{name} can't be adapted", "target_modules")
    if targets.is_open or targets.is_all_linear:
        return
    present = {(pair.layer, pair.module) for pair in pairs}
    missing = [
        key for layer, name, key in _linears(root, shape) if (layer, name) not in present and targets.covers(key, layer)
    ]
    if missing:
        raise AdapterInvalid(
            "tensor_missing",
            f"adapter_config.json targets {len(missing)} modules that the file lacks: {_listed(missing)}",
            missing[0],
        )


def _linears(root: str, shape: BaseShape) -> Iterable[tuple[int, str, str]]:
    for layer in range(shape.num_layers):
        for name in shape.linears:
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            yield layer, name, f"{root}layers.{layer}.{block}.{name}"


def _module(pair: _Pair, config: LoraConfig, targets: Targets, shape: BaseShape, limits: Limits) -> ModuleSpec:
    out_features, in_features = shape.linears[pair.module]
    for tensor in (pair.a, pair.b):
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise AdapterUnsupported(
                "unsupported_dtype",
                f"{shown(tensor.name)} is {tensor.dtype}; F32, F16 and BF16 are supported",
                tensor.name,
            )
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            _invalid("shape_mismatch", f"{shown(tensor.name)} has shape {list(tensor.shape)}, not a matrix", tensor)
    rank = pair.a.shape[0]
    for tensor, expected in ((pair.a, (rank, in_features)), (pair.b, (out_features, rank))):
        if tensor.shape != expected:
            _invalid(
                "shape_mismatch",
                f"{shown(tensor.name)} has shape {list(tensor.shape)}, this base needs {list(expected)}",
                tensor,
            )
    declared = targets.rank(pair.key)
    if declared is not None and declared != rank:
        _invalid(
            "rank_mismatch",
            f"{shown(pair.key)} has rank {rank} in its tensors, {declared} in adapter_config.json",
            pair.a,
        )
    if rank > limits.max_rank:
        raise AdapterTooLarge(
            "rank_too_large", f"{shown(pair.key)} has rank {rank}, at most {limits.max_rank} is allowed", pair.a.name
        )
    scale = config.scale(targets.alpha(pair.key), rank)
    return ModuleSpec(pair.layer, pair.module, rank, scale, pair.a.name, pair.b.name)


def _base_warnings(config: LoraConfig, shape: BaseShape) -> tuple[str, ...]:
    if not config.base_model or not shape.base_name:
        return ()
    theirs, ours = (name.rstrip("/").rsplit("/", 1)[-1].lower() for name in (config.base_model, shape.base_name))
    if theirs == ours:
        return ()
    return (f"trained for {shown(config.base_model)}, served on {shape.base_name}: the shapes fit",)
