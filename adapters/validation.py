"""Is it sound: does the config agree with the tensors, do these fit the base, are the values finite. numpy, no torch.

    inspect(directory, …), describe(…)    config and header only: milliseconds; what the loader asks too
    validate(directory, …)                that, and a look at every value
    validate_in_subprocess(directory, …)  the same in a child with bounded memory and time (adapters/sandbox.py)

Tensors decide what is applied and the config must agree: a tensor that the config doesn't speak of is refused, and so
is a module that it names and the file lacks. Which base an adapter was trained for is decided by shapes; another name
than ours in base_model_name_or_path is a warning, because the same model goes by many names and paths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import NoReturn

from adapters.agreement import Agreement
from adapters.base_copies import check_copies, check_twins
from adapters.config import MAX_CONFIG_BYTES, LoraConfig, parse_config
from adapters.header import Tensor, open_regular, read_header
from adapters.names import FUSED, Found, collect
from adapters.new_tokens import TOKENIZER_FILE, read_new_tokens
from adapters.spec import (
    MODULES,
    NO_LAYER,
    TABLES,
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
from adapters.targets import MATCH_SECONDS, Targets
from adapters.values import check_values


@dataclass(frozen=True)
class Limits:
    """What an adapter may cost. `max_bytes` is of the weights file; `memory_bytes`, `cpu_s` and `timeout_s` bound the
    subprocess; `match_s` the CPU time of its patterns."""

    max_rank: int = 64
    max_bytes: int = 1 << 30
    max_header_bytes: int = 4 << 20
    memory_bytes: int = 1 << 30
    cpu_s: int = 60
    timeout_s: float = 120.0
    match_s: float = MATCH_SECONDS


PATIENT = Limits(max_rank=sys.maxsize, max_bytes=sys.maxsize, match_s=100 * MATCH_SECONDS)
"""For what has passed the door."""


@dataclass(frozen=True)
class Inspected:
    """A spec, where its tensors lie in the weights file, which of them should equal the base's own: (the copy, the
    module), and which pairs are one and the same."""

    spec: AdapterSpec
    tensors: dict[str, Tensor]
    copies: tuple[tuple[Tensor, str], ...] = ()
    twins: tuple[tuple[Tensor, Tensor], ...] = ()


def validate(directory: Path, shape: BaseShape, limits: Limits) -> AdapterSpec:
    """The whole check, in this process. Raises AdapterError; returns what the adapter is."""
    with open_regular(directory / WEIGHTS_FILE) as file:
        found = inspect(directory, file, shape, limits)
        check_content(file, found, shape)
    return with_new_tokens(directory, found.spec, shape)


def with_new_tokens(directory: Path, spec: AdapterSpec, shape: BaseShape) -> AdapterSpec:
    """What its tokenizer adds. One that does more is refused, or left out where the adapter has no rows of its own."""
    path = directory / TOKENIZER_FILE
    if not os.path.lexists(path):
        return spec
    try:
        return replace(spec, new_tokens=read_new_tokens(path, shape.grown(spec.num_added)))
    except AdapterUnsupported as error:
        if spec.num_added:
            raise
        return replace(spec, warnings=(*spec.warnings, f"{TOKENIZER_FILE} is left out: {error.message}"))


def check_content(file: FileIO, found: Inspected, shape: BaseShape) -> None:
    """A look at every value. Raises AdapterInvalid, AdapterUnsupported."""
    scales = {name: module.scale for module in found.spec.modules for name in (module.tensor_b, module.lora_bias)}
    check_values(file, found.tensors, scales)
    check_copies(file, found.copies, shape)
    check_twins(file, found.twins)


def describe(directory: Path, shape: BaseShape) -> AdapterSpec:
    """What stored files say they are, by config and header: only for what has been validated before."""
    with open_regular(directory / WEIGHTS_FILE) as file:
        return inspect(directory, file, shape, PATIENT).spec


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
    found = collect(tensors)
    num_added = _num_added(found, shape)
    shape = shape.grown(num_added)
    targets = Targets(config, limits.match_s)
    agreement = Agreement(config, targets, shape, found)
    agreement.check()
    copies = [(each.parts[kind], each.module) for each in found for kind in _copies(each, agreement)]
    reader = _Reader(config, targets, shape, limits, agreement)
    modules = tuple(_with_tied_head([module for each in found for module in reader.read(each)], shape))
    _check_vocabulary(modules, shape)
    spec = AdapterSpec(
        modules=modules,
        rank=max(module.rank for module in modules),
        target_modules=tuple(name for name in MODULES if any(module.module == name for module in modules)),
        num_tensors=len(tensors),
        packed_bytes=2 * packed_elements(modules, shape),
        base_model=None if config.base_model is None else shown(config.base_model),
        warnings=config.warnings + _base_warnings(config, shape) + _copy_warnings(copies),
        num_added=num_added,
    )
    twins = tuple((each.parts["weight"], each.parts["saved"]) for each in found if "saved" in each.parts)
    return Inspected(spec, {tensor.name: tensor for tensor in tensors}, tuple(copies), twins)


def _num_added(found: list[Found], shape: BaseShape) -> int:
    """How many rows the largest table has beyond the base's."""
    tables = [each.parts[kind] for each in found if each.module in TABLES for kind in _WHOLE if kind in each.parts]
    rows = [table.shape[0] for table in tables if table.shape[1:] == (shape.hidden_size,)]
    return max(0, max(rows, default=0) - shape.vocab_size)


_WHOLE = ("weight", "saved", "copy")


def _with_tied_head(modules: list[ModuleSpec], shape: BaseShape) -> Iterator[ModuleSpec]:
    """What is changed, with the head changing as the embedding where both are one matrix."""
    found = {module.module: module for module in modules if module.module in TABLES}
    yield from (module for module in modules if _is_any(module) and module.module != "lm_head")
    head = found.get("lm_head", ModuleSpec(NO_LAYER, "lm_head"))
    embedding = found.get("embed_tokens")
    if embedding is not None and shape.tie_word_embeddings:
        if embedding.tokens and not head.tokens:
            head = replace(head, tokens=embedding.tokens, token_ids=embedding.token_ids)
        if not head.weight and not head.added:
            head = replace(head, added=embedding.added)
    if _is_any(head):
        yield head


def _check_vocabulary(modules: Iterable[ModuleSpec], shape: BaseShape) -> None:
    """New tokens have rows in both tables. Raises AdapterUnsupported."""
    if not shape.num_added:
        return
    found = {module.module: module for module in modules if module.module in TABLES}
    for name in TABLES:
        module = found.get(name)
        if module is None or not (module.added or module.weight):
            raise AdapterUnsupported("unsupported_vocabulary", f"{name} has no rows for the new tokens", name)
        if module.magnitude:
            raise AdapterUnsupported(
                "unsupported_vocabulary", f"DoRA on {name} can't be combined with new tokens", module.magnitude
            )


def _copies(each: Found, agreement: Agreement) -> Iterator[str]:
    """Parts of this module that PEFT copied from the base."""
    if "copy" in each.parts:
        yield "copy"
    if agreement.is_copy(each):
        yield "weight"


def _is_any(module: ModuleSpec) -> bool:
    return bool(module.rank or module.weight or module.tokens or module.bias or module.added)


class _Reader:
    """From the tensors of a module to what they do, with every shape checked."""

    def __init__(
        self, config: LoraConfig, targets: Targets, shape: BaseShape, limits: Limits, agreement: Agreement
    ) -> None:
        self._agreement = agreement
        self._config = config
        self._targets = targets
        self._shape = shape
        self._limits = limits

    def read(self, each: Found) -> Iterator[ModuleSpec]:
        """One spec for every module of ours that this one stands for."""
        members = FUSED.get(each.module, (each.module,))
        sizes = [self._shape.size(member) for member in members]
        rank = self._check(each, sum(outputs for outputs, _ in sizes), sizes[0][1])
        scale = self._config.scale(self._targets.alpha(each.path), rank) if rank else 1.0
        names = {kind: tensor.name for kind, tensor in each.parts.items()}
        copy = names.get("copy", "")
        if self._agreement.is_copy(each):
            copy = names.pop("weight")
        first_row = 0
        for member, (outputs, _) in zip(members, sizes, strict=True):
            yield ModuleSpec(
                each.layer, member, rank, scale, names.get("a", ""), names.get("b", ""), first_row,
                magnitude=names.get("magnitude", ""), bias=names.get("bias", ""),
                lora_bias=names.get("lora_bias", ""), weight=names.get("weight", ""),
                tokens=names.get("tokens", ""), token_ids=self._agreement.token_ids(each.module),
                added=copy if self._shape.num_added and "weight" not in names else "",
            )  # fmt: skip
            first_row += outputs

    def _check(self, each: Found, outputs: int, inputs: int) -> int:
        """The rank of A and B, 0 where there are none."""
        a = each.parts.get("a")
        rank = a.shape[0] if a is not None and len(a.shape) == 2 else 0
        token_ids = self._agreement.token_ids(each.module) if "tokens" in each.parts else ()
        shape = self._shape
        table = (shape.vocab_size, shape.hidden_size)
        expected = {
            "a": (rank, inputs), "b": (outputs, rank), "magnitude": (outputs,), "bias": (outputs,),
            "lora_bias": (outputs,), "weight": table if each.module in TABLES else (outputs,), "copy": table,
            "saved": table, "tokens": (len(token_ids), shape.hidden_size),
        }  # fmt: skip
        for kind, tensor in each.parts.items():
            self._check_tensor(each, tensor, expected[kind])
        if any(index >= shape.vocab_size for index in token_ids):
            raise _vocabulary(each.parts["tokens"], shape)
        if a is not None:
            self._check_rank(each, a, rank)
        return rank

    def _check_tensor(self, each: Found, tensor: Tensor, expected: tuple[int, ...]) -> None:
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise AdapterUnsupported(
                "unsupported_dtype",
                f"{shown(tensor.name)} is {tensor.dtype}; F32, F16 and BF16 are supported",
                tensor.name,
            )
        if len(tensor.shape) == len(expected) and 0 not in tensor.shape and tensor.shape != expected:
            vocab = self._shape.vocab_size
            differs = [(a, b) for a, b in zip(tensor.shape, expected, strict=True) if a != b]
            if each.module in TABLES and len(differs) == 1 and differs[0][1] == vocab and differs[0][0] > vocab:
                raise _vocabulary(tensor, self._shape)
        if tensor.shape != expected or 0 in tensor.shape:
            _invalid(
                "shape_mismatch",
                f"{shown(tensor.name)} has shape {list(tensor.shape)}, this base needs {list(expected)}",
                tensor,
            )

    def _check_rank(self, each: Found, a: Tensor, rank: int) -> None:
        declared = self._targets.rank(each.path)
        if declared is not None and declared != rank:
            _invalid(
                "rank_mismatch",
                f"{shown(each.path)} has rank {rank} in its tensors, {declared} in adapter_config.json",
                a,
            )
        if rank > self._limits.max_rank:
            limit = self._limits.max_rank
            raise AdapterTooLarge(
                "rank_too_large", f"{shown(each.path)} has rank {rank}, at most {limit} is allowed", a.name
            )


def _vocabulary(tensor: Tensor, shape: BaseShape) -> AdapterUnsupported:
    return AdapterUnsupported(
        "unsupported_vocabulary",
        f"{shown(tensor.name)} is of tokens beyond the {shape.vocab_size} that embed_tokens and lm_head have rows for",
        tensor.name,
    )


def _invalid(code: str, message: str, tensor: Tensor) -> NoReturn:
    raise AdapterInvalid(code, message, tensor.name)


def _copy_warnings(copies: list[tuple[Tensor, str]]) -> tuple[str, ...]:
    if not copies:
        return ()
    return (f"{len(copies)} copies of the base's own weights are not kept: {', '.join(name for _, name in copies)}",)


def _base_warnings(config: LoraConfig, shape: BaseShape) -> tuple[str, ...]:
    if not config.base_model or not shape.base_name:
        return ()
    theirs, ours = (name.rstrip("/").rsplit("/", 1)[-1].lower() for name in (config.base_model, shape.base_name))
    if theirs == ours:
        return ()
    return (f"trained for {shown(config.base_model)}, served on {shape.base_name}: the shapes fit",)
