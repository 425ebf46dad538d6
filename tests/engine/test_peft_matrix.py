"""PEFT is the judge: every kind of adapter that it makes gives its logits, alone and in one batch with all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.loader import PackedAdapter, load
from adapters.validation import Limits, validate
from engine.kv_cache import KVCache
from engine.lora import LoraBank
from engine.model.base_weights import ModelBase
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import load_model
from engine.ops import Ops
from engine.ops.cpu import CpuOps
from engine.ops.native import NativeOps
from engine.ops.reference import ReferenceOps
from tests.engine.forward import BLOCK_SIZE, Part, forward, make_sequence
from tests.engine.peft_cases import BASES, CASES, PROMPT, Case, judge, make_adapter, make_base

OPS: dict[str, Callable[[], Ops]] = {
    "reference": lambda: ReferenceOps(torch.float32),
    "cpu": lambda: CpuOps(torch.float32),
    "native": NativeOps,
}


@dataclass(frozen=True)
class Files:
    """Bases, adapters and PEFT's answers, each made when it is asked for."""

    root: Path

    def base(self, name: str) -> Path:
        path = self.root / name
        return path if path.is_dir() else make_base(path, name)

    def adapter(self, case: Case) -> Path:
        path = self.root / f"adapter-{CASES.index(case)}"
        return path if path.is_dir() else make_adapter(path, self.base(case.base), case)

    @cache  # noqa: B019
    def wanted(self, case: Case) -> Tensor:
        return judge(self.base(case.base), self.adapter(case), case.prompt, case.num_added)

    @cache  # noqa: B019
    def wanted_of_base(self, name: str) -> Tensor:
        return judge(self.base(name), None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("peft"))


class Engine:
    """A model and a bank, driven without scheduler."""

    def __init__(self, path: Path, ops: Ops) -> None:
        self.config = ModelConfig.from_dir(path)
        self.ops = ops
        self.model: Transformer = load_model(path, self.config, ops)
        self.bank = LoraBank(self.config.base_shape(), 1 << 26, ops.adapter_dtype)

    def load(self, path: Path) -> PackedAdapter:
        shape = self.config.base_shape()
        return load(path, shape, self.ops.adapter_dtype, 64, base=ModelBase(self.model))

    def logits(
        self, adapters: list[str | None], chunk: int = len(PROMPT), prompts: list[list[int]] | None = None
    ) -> list[Tensor]:
        """One row of PROMPT, or of its own prompt, per adapter, all in one batch, in chunks."""
        prompts = prompts or [PROMPT] * len(adapters)
        cache = KVCache(self.config, 4 * len(adapters), BLOCK_SIZE, self.ops.weight_dtype)
        rows = [
            make_sequence(prompt, [2 * i, 2 * i + 1], name)
            for i, (name, prompt) in enumerate(zip(adapters, prompts, strict=True))
        ]
        answers: list[list[Tensor]] = [[] for _ in rows]
        for start in range(0, len(PROMPT), chunk):
            end = min(start + chunk, len(PROMPT))
            parts = forward(self.model, cache, [Part(row, start, end) for row in rows], self.bank)
            for answer, part in zip(answers, parts, strict=True):
                answer.append(part)
        return [torch.cat(answer) for answer in answers]


def logits_of(engine: Engine, cases: Sequence[Case | None], chunk: int = len(PROMPT)) -> list[Tensor]:
    """Each row's own vocabulary (None = a base row); nothing is possible beyond it."""
    names = [None if case is None else case.name for case in cases]
    rows = engine.logits(names, chunk, [PROMPT if case is None else case.prompt for case in cases])
    widths = [engine.config.vocab_size + (0 if case is None else case.num_added) for case in cases]
    for row, width in zip(rows, widths, strict=True):
        assert (row[:, width:] == -torch.inf).all()
    return [row[:, :width] for row, width in zip(rows, widths, strict=True)]


def limit(wanted: Tensor, ops: str) -> float:
    largest = float(wanted.abs().max())
    return 4e-2 * largest if ops == "native" else 1e-5 * largest + 2e-4


def test_the_matrix_is_large() -> None:
    """At least 40 adapters, no two alike, on tied, untied and biased bases."""
    assert len({case.name for case in CASES}) == len(CASES) >= 40
    assert {case.base for case in CASES} == set(BASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_alone(files: Files, case: Case) -> None:
    """AL-01, AL-08, AL-10, AL-26: an adapter by itself gives PEFT's logits, and not the base's; it is whole: validation
    foretold its size, and every tensor is of a module or a dropped copy."""
    engine = Engine(files.base(case.base), CpuOps(torch.float32))
    spec = validate(files.adapter(case), engine.config.base_shape(), Limits())
    host = engine.load(files.adapter(case))
    engine.bank.place(case.name, host)

    (got,) = logits_of(engine, [case])

    wanted = files.wanted(case)
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= limit(wanted, "cpu")
    of_base = files.wanted_of_base(case.base)
    assert (wanted[:, : of_base.shape[1]] - of_base).abs().max() > 100 * limit(wanted, "cpu")
    assert host.rank == spec.rank
    assert host.size_bytes <= 2 * spec.packed_bytes


@pytest.mark.parametrize("chunk", [len(PROMPT), 7, 1])
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("base", BASES)
def test_mixed(files: Files, base: str, ops: str, chunk: int) -> None:
    """All adapters of a base and base rows between them, in one batch, in one step, in chunks and token by token: each
    row as PEFT has it alone; base rows bit for bit as in a batch without adapters."""
    cases = [case for case in CASES if case.base == base]
    engine = Engine(files.base(base), OPS[ops]())
    for case in cases:
        engine.bank.place(case.name, engine.load(files.adapter(case)))
    got = logits_of(engine, [one for case in cases for one in (case, None)], chunk)

    for case, row, plain in zip(cases, got[::2], got[1::2], strict=True):
        wanted, of_base = files.wanted(case), files.wanted_of_base(base)
        assert (row - wanted).abs().max() <= limit(wanted, ops), case.name
        assert (plain - of_base).abs().max() <= limit(of_base, ops)
        assert torch.equal(plain, got[1])


def test_native_bits_do_not_depend_on_the_batch(files: Files) -> None:
    """Each row of the mixed batch has the bits that it has alone, whatever its adapter changes."""
    cases = [case for case in CASES if case.base == "untied"]
    engine = Engine(files.base("untied"), NativeOps())
    for case in cases:
        engine.bank.place(case.name, engine.load(files.adapter(case)))

    mixed = logits_of(engine, [None, *cases])

    for case, row in zip([None, *cases], mixed, strict=True):
        assert torch.equal(logits_of(engine, [case])[0], row), case
        assert torch.equal(logits_of(engine, [case], chunk=3)[0], row), case
