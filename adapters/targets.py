"""Which linears a config speaks of, with which rank and alpha: PEFT's own matching rules, bounded in time.

Patterns come from strangers and Python's `re` can take exponential time: in the gateway a subprocess with a CPU limit
bears that, and MATCH_SECONDS keeps what passes there harmless for the engine, which matches once more at load.
It is more patient: a virtual machine may count as CPU time what its host took away.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import TypeVar

from adapters.config import LoraConfig
from adapters.spec import AdapterInvalid, shown

MATCH_SECONDS = 0.1

T = TypeVar("T")
_PLAIN = re.compile(
    r"(?:(?:base_model|model|language_model|layers|\d+|self_attn|mlp|[qkvo]_proj|gate_proj|up_proj|down_proj)(?:\.|$))+"
)


class Targets:
    """Answers for module keys as PEFT knows them, such as "model.layers.0.self_attn.q_proj"."""

    def __init__(self, config: LoraConfig, limit_s: float = MATCH_SECONDS) -> None:
        """`limit_s` of CPU time for all answers together. Raises AdapterInvalid for a pattern that isn't a regular
        expression."""
        self._config = config
        self._limit_s = limit_s
        self._spent_s = 0.0
        self._includes = _Names("target_modules", config.target_modules, by_name=True)
        self._excludes = _Names("exclude_modules", config.exclude_modules, by_name=False)
        self._ranks = _Patterns("rank_pattern", config.rank_pattern)
        self._alphas = _Patterns("alpha_pattern", config.alpha_pattern)
        self._layers = [_compile("layers_pattern", rf"(?:^|.*?\.){p}\.(\d+)\.") for p in config.layers_pattern]

    @property
    def is_open(self) -> bool:
        """The config names no modules ([] or null): the tensors alone say what is adapted."""
        return not self._config.target_modules

    @property
    def is_all_linear(self) -> bool:
        target = self._config.target_modules
        return isinstance(target, str) and target.lower() == "all-linear"

    def covers(self, key: str, layer: int) -> bool:
        """The config adapts this module. `layer` is the index that stands in the key."""
        start = time.thread_time()
        try:
            if self._excludes.match(key):
                return False
            if self._includes.is_whole(key):
                return True  # also in a layer that layers_to_transform leaves out: PEFT narrows only ends of names
            if not (self.is_open or self.is_all_linear or self._includes.match(key)):
                return False
            return self._config.layers is None or self._layer(key, layer) in self._config.layers
        finally:
            self._charge(start)

    def names(self, key: str) -> bool:
        """The config names this module, which lies outside the layers, itself ("lm_head"); not by "all-linear"."""
        return not (self.is_open or self.is_all_linear) and self._includes.match(key) and not self._excludes.match(key)

    def rank(self, key: str) -> int | None:
        """The rank that the config gives to this module; None if it gives none."""
        start = time.thread_time()
        try:
            return self._ranks.get(key, self._config.rank)
        finally:
            self._charge(start)

    def alpha(self, key: str) -> float:
        start = time.thread_time()
        try:
            return self._alphas.get(key, self._config.alpha)
        finally:
            self._charge(start)

    def _layer(self, key: str, layer: int) -> int | None:
        if not self._layers:
            return layer
        found = next((match for match in (pattern.match(key) for pattern in self._layers) if match), None)
        if found is None:
            return None
        if found.groups()[-1] is None:  # an alternative that matches without the number behind it
            raise AdapterInvalid(
                "config_invalid",
                "adapter_config.json: layers_pattern matches without a layer's number",
                "layers_pattern",
            )
        return int(found.groups()[-1])

    def _charge(self, start: float) -> None:
        self._spent_s += time.thread_time() - start
        if self._spent_s > self._limit_s:
            raise AdapterInvalid("config_too_complex", "the patterns in adapter_config.json take too long to match")


class _Names:
    """A list matches whole names or their ends at a dot; one string is a regular expression over the whole key, and
    (`by_name`) may also be the end of a name, which PEFT would not match and people write."""

    def __init__(self, param: str, names: str | tuple[str, ...], by_name: bool) -> None:
        is_pattern = isinstance(names, str) and names.lower() != "all-linear"
        self._pattern = _compile(param, str(names)) if is_pattern and names else None
        self._names = frozenset((names,) if isinstance(names, str) and by_name else () if self._pattern else names)

    def is_whole(self, key: str) -> bool:
        """The whole key is named, or fits the pattern."""
        return key in self._names or (self._pattern is not None and self._pattern.fullmatch(key) is not None)

    def match(self, key: str) -> bool:
        return not self._names.isdisjoint(_ends(key)) or self.is_whole(key)


class _Patterns:
    """First pattern that matches an end of the key wins. Plain paths, of which there may be one per module, are
    looked up; the others are tried one by one."""

    def __init__(self, param: str, patterns: Mapping[str, T]) -> None:
        self._values: list[object] = list(patterns.values())
        self._plain: dict[str, int] = {}
        self._others: list[tuple[int, re.Pattern[str]]] = []
        for index, pattern in enumerate(patterns):
            if _PLAIN.fullmatch(pattern):
                self._plain[pattern] = index
            else:
                self._others.append((index, _compile(param, rf"(.*\.)?({pattern})$")))

    def get(self, key: str, default: T) -> T:
        best = min((self._plain[end] for end in _ends(key) if end in self._plain), default=len(self._values))
        for index, pattern in self._others:
            if index > best:
                break
            if pattern.match(key):
                best = index
                break
        return default if best == len(self._values) else self._values[best]  # type: ignore[return-value]


def _ends(key: str) -> Iterator[str]:
    """The key and what follows each of its dots."""
    yield key
    position = key.find(".")
    while position >= 0:
        yield key[position + 1 :]
        position = key.find(".", position + 1)


def _compile(param: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise AdapterInvalid(
            "config_invalid", f"adapter_config.json: {param} holds a bad pattern: {shown(str(error))}", param
        ) from None
