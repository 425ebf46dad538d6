"""Do config and tensors speak of the same modules: none more in the file, none fewer, each with the parts that the
config's switches ask for. Knows no shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from adapters.config import LoraConfig
from adapters.header import Tensor
from adapters.names import FUSED, Found, listed
from adapters.spec import LINEARS, TABLES, AdapterInvalid, AdapterUnsupported, BaseShape, shown
from adapters.targets import Targets


class Agreement:
    """What adapter_config.json says about each module of the base."""

    def __init__(self, config: LoraConfig, targets: Targets, shape: BaseShape, found: list[Found]) -> None:
        self._config = config
        self._targets = targets
        self._shape = shape
        self._found = found
        example = next((each.path for each in found if "layers." in each.path), "model.layers.")
        self._root = example[: example.index("layers.")]

    def check(self) -> None:
        """Raises AdapterInvalid or AdapterUnsupported, naming tensor, module or key."""
        for each in self._found:
            self._check_place(each)
            if each.is_lora:
                self._check_lora(each)
            self._check_others(each)
        if not any(each.is_lora for each in self._found):
            raise AdapterInvalid("tensor_missing", "the file holds no lora_A and lora_B")
        self._check_saved()
        self._check_missing()

    def is_copy(self, each: Found) -> bool:
        """`weight` of a table that the config doesn't speak of: PEFT saved the base's beside the adapter."""
        return "weight" in each.parts and each.module in TABLES and not self._saves(each.path)

    def token_ids(self, module: str) -> tuple[int, ...]:
        """Whose rows are trained: a head that is tied to the embedding has those of the embedding."""
        ids = self._config.token_ids
        is_tied = module == "lm_head" and module not in ids and self._shape.tie_word_embeddings
        return ids.get("embed_tokens" if is_tied else module, ())

    def _check_place(self, each: Found) -> None:
        tensor = each.first
        if each.layer >= self._shape.num_layers:
            _no("layer_out_of_range", f"{shown(tensor.name)}: the base has {self._shape.num_layers} layers", tensor)
        for module in FUSED.get(each.module, (each.module,)):
            if not self._shape.has(module):
                _no("module_unknown", f"{shown(tensor.name)}: the base has no {module}", tensor)

    def _check_lora(self, each: Found) -> None:
        parts, config = each.parts, self._config
        for side, other in (("a", "b"), ("b", "a")):
            if side not in parts:
                _no("tensor_missing", f"{shown(parts.get(other, each.first).name)} has no lora_{side.upper()}",
                    each.first)  # fmt: skip
        if not self._covers(each):
            _no("target_mismatch", f"{shown(parts['a'].name)} is not among what adapter_config.json targets",
                parts["a"])  # fmt: skip
        wanted = {"magnitude": config.use_dora, "lora_bias": config.lora_bias and each.module != "embed_tokens"}
        for kind, key in (("magnitude", "use_dora"), ("lora_bias", "lora_bias")):
            if kind in parts and not wanted[kind]:
                _no("target_mismatch", f"{shown(parts[kind].name)}, but {key} is off", parts[kind])
            if wanted[kind] and kind not in parts:
                _no("tensor_missing", f"{key} is on, but {shown(each.path)} has none", parts["a"])

    def _check_others(self, each: Found) -> None:
        parts = each.parts
        if "bias" in parts and not self._has_bias(each):
            why = f"bias is {self._config.bias!r}" if each.module in self._biased() else "the base has no such bias"
            _no("target_mismatch", f"{shown(parts['bias'].name)}, but {why}", parts["bias"])
        if "tokens" in parts and not self.token_ids(each.module):
            _no("target_mismatch", f"{shown(parts['tokens'].name)}: trainable_token_indices has no {each.module}",
                parts["tokens"])  # fmt: skip
        if "weight" in parts and each.module not in TABLES and not self._saves(each.path):
            _no("target_mismatch", f"{shown(parts['weight'].name)} is not among modules_to_save", parts["weight"])
        kinds = [each.is_lora, "tokens" in parts, "weight" in parts and not self.is_copy(each)]
        if sum(kinds) > 1:
            _no("target_mismatch", f"{shown(each.path)} is changed in several ways", each.first)

    def _check_saved(self) -> None:
        """What the config wants saved whole is there, and is something that we can replace."""
        present = {(each.layer, each.module) for each in self._found if "weight" in each.parts}
        paths = list(self._paths())
        for layer, module, path in paths:
            if self._saves(path) and (layer, module) not in present:
                if module in LINEARS:
                    raise AdapterUnsupported(
                        "unsupported_modules_to_save",
                        f"only norms, embed_tokens and lm_head can be replaced whole, not {path}",
                        "modules_to_save",
                    )
                raise AdapterInvalid("tensor_missing", f"modules_to_save names {path}, which the file lacks", path)

    def _check_missing(self) -> None:
        lora = {(each.layer, each.module) for each in self._found if each.is_lora}
        missing = [] if self._targets.is_open or self._targets.is_all_linear else [
            path for layer, module, path in self._paths()
            if (module in LINEARS or module in FUSED or module in TABLES) and (layer, module) not in lora
            and self._targets.covers(path, layer) and not self._saves(path)
        ]  # fmt: skip
        biases = {(each.layer, each.module) for each in self._found if "bias" in each.parts}
        for layer, module, path in self._paths():
            is_wanted = self._config.bias == "all" or (self._config.bias == "lora_only" and (layer, module) in lora)
            if is_wanted and module in self._biased() and (layer, module) not in biases:
                missing.append(f"{path}.bias")
        held = {each.module for each in self._found if "tokens" in each.parts}
        missing += [f"{name}.trainable_tokens_delta" for name in self._config.token_ids if name not in held]
        if missing:
            raise AdapterInvalid(
                "tensor_missing",
                f"adapter_config.json speaks of {len(missing)} modules that the file lacks: {listed(missing)}",
                missing[0],
            )

    def _covers(self, each: Found) -> bool:
        if each.module not in TABLES:
            return self._targets.covers(each.path, each.layer)
        paths = {each.path}
        if self._config.ties_weights and self._shape.tie_word_embeddings:
            paths |= {"lm_head", f"{self._root}embed_tokens"}
        return not self._targets.is_all_linear and any(self._targets.covers(path, each.layer) for path in paths)

    def _saves(self, path: str) -> bool:
        """As PEFT matches modules_to_save: by the end of the name, at a dot or not."""
        paths = [path]
        if self._config.ties_weights and self._shape.tie_word_embeddings and path.endswith(TABLES):
            paths = ["lm_head", f"{self._root}embed_tokens"]
        return any(each.endswith(name) for each in paths for name in self._config.modules_to_save if name)

    def _has_bias(self, each: Found) -> bool:
        is_named = self._config.bias == "all" or (self._config.bias == "lora_only" and each.is_lora)
        return is_named and each.module in self._biased()

    def _biased(self) -> set[str]:
        """Linears with a bias; a fused one has what its members have."""
        fused = {name for name, members in FUSED.items() if set(members) <= set(self._shape.biases)}
        return fused | set(self._shape.biases)

    def _paths(self) -> Iterator[tuple[int, str, str]]:
        """Every module of the base under the name that the trained model had for it."""
        seen = {each.module for each in self._found}
        names = list(_fused_where(self._shape.linears, seen))
        norms = [("", "input_layernorm"), ("", "post_attention_layernorm")]
        norms += [("self_attn.", name) for name in ("q_norm", "k_norm") if self._shape.has(name)]
        for layer in range(self._shape.num_layers):
            for name in names:
                block = "mlp" if name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj") else "self_attn"
                yield layer, name, f"{self._root}layers.{layer}.{block}.{name}"
            for block, name in norms:
                yield layer, name, f"{self._root}layers.{layer}.{block}{name}"
        for name, root in (("norm", self._root), ("embed_tokens", self._root), ("lm_head", "")):
            yield -1, name, f"{root}{name}"


def _fused_where(linears: Iterable[str], seen: set[str]) -> Iterator[str]:
    """The base's linears, with fused ones in the place of their members where the file has them fused."""
    hidden = {member for name in FUSED if name in seen for member in FUSED[name]}
    yield from (name for name in linears if name not in hidden)
    yield from (name for name in FUSED if name in seen)


def _no(code: str, message: str, tensor: Tensor) -> NoReturn:
    raise AdapterInvalid(code, message, tensor.name)
