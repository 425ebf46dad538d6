"""Which linears a config speaks of: what PEFT itself matches, with the same ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from adapters.config import parse_config
from adapters.spec import LINEARS, AdapterInvalid
from adapters.targets import Targets
from tests.adapters.files import config, key

KEYS = [(layer, key(layer, name, "model.")) for layer in (0, 1, 2, 11) for name in LINEARS]
NAMES = st.sampled_from(
    ["q_proj", "self_attn.v_proj", "_proj", "proj", "layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj",
     "1.self_attn.q_proj", "mlp", "o_proj.", "q.proj", "layers.1"]
)  # fmt: skip
PATTERNS = st.sampled_from(
    ["q_proj", "mlp.up_proj", "layers.1.self_attn.q_proj", r"layers\.[01]\..*", ".*mlp.*", "^q_proj", "(q|v)_proj",
     "^model.layers.0.self_attn.k_proj", "self.attn.q.proj", "model.layers.11.mlp.down_proj", "proj", ""]
)  # fmt: skip


def targets(**changes: Any) -> Targets:
    return Targets(parse_config(json.dumps(config(**changes)).encode()))


@given(
    names=st.one_of(st.lists(NAMES, min_size=1, max_size=3), st.sampled_from([r".*q_proj", r"model\.layers\.1\..*"])),
    excluded=st.one_of(st.none(), st.lists(NAMES, max_size=2), st.sampled_from([r".*layers\.1\..*", "q_proj"])),
    layers=st.one_of(st.none(), st.just(1), st.lists(st.sampled_from([0, 1, 2, 11]), max_size=2)),
    pattern=st.sampled_from([None, "layers", ["h", "layers"], "blocks", []]),
)
def test_targets_match_as_peft_matches(names: Any, excluded: Any, layers: Any, pattern: Any) -> None:
    """PEFT is the judge of which modules a config names: lists, patterns, exclusions, layer choices."""
    if isinstance(names, str):
        layers = pattern = None  # PEFT allows these only beside a list
    ours = targets(targets=names, exclude_modules=excluded, layers_to_transform=layers, layers_pattern=pattern)
    theirs = SimpleNamespace(
        target_modules=names, exclude_modules=excluded, layers_to_transform=layers, layers_pattern=pattern
    )

    for layer, name in KEYS:
        assert ours.covers(name, layer) == bool(check_target_module_exists(theirs, name)), name


@given(st.dictionaries(PATTERNS, st.integers(1, 64), max_size=5))
def test_rank_and_alpha_patterns_match_as_peft_matches(patterns: dict[str, int]) -> None:
    """PEFT is the judge of which pattern gives a module its rank: ends of names, first one wins."""
    ours = targets(rank=3, rank_pattern=patterns, alpha_pattern=patterns)

    for _, name in KEYS:
        expected = patterns.get(get_pattern_key(list(patterns), name))
        assert ours.rank(name) == (3 if expected is None else expected)
        assert ours.alpha(name) == (8 if expected is None else expected)


@pytest.mark.parametrize("value", ["all-linear", "All-Linear", [], None])
def test_open_configs_cover_every_linear(value: Any) -> None:
    """ "all-linear" and an empty list leave the choice to the tensors."""
    assert all(targets(targets=value).covers(name, layer) for layer, name in KEYS)
    assert not targets(targets=value).names("lm_head")


def test_a_layers_pattern_needs_a_number() -> None:
    """A pattern with an alternative that finds no layer (found by fuzzing) is a config error, not a crash."""
    found = targets(layers_to_transform=[0], layers_pattern="|ayers")

    with pytest.raises(AdapterInvalid) as caught:
        found.covers("model.layers.0.self_attn.q_proj", 0)
    assert (caught.value.code, caught.value.param) == ("config_invalid", "layers_pattern")
