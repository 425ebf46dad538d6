"""Loading many adapters: what they have in common is worked out once, and their values are read in long pieces, with
the bits that one tensor at a time would give."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters import blueprint, loader, spans
from adapters.loader import OFFSET_A, OFFSET_B, UNIT, Loader, PackedAdapter
from adapters.numbers import cast
from adapters.spec import LINEARS, AdapterError
from tests.adapters.files import SHAPE, config, key, pairs, write


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose config and header were looked at."""
    seen: list[Path] = []
    whole = loader.inspect

    def noting(directory: Path, *rest: object) -> object:
        seen.append(directory)
        return whole(directory, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "inspect", noting)
    return seen


def scaled(tensors: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in tensors.items()}


def b_of(packed: PackedAdapter, layer: int, name: str, rank: int) -> torch.Tensor:
    return matrix(packed, layer, name, OFFSET_B, (rank, SHAPE.linears[name][0])).t()


def a_of(packed: PackedAdapter, layer: int, name: str, rank: int) -> torch.Tensor:
    return matrix(packed, layer, name, OFFSET_A, (rank, SHAPE.linears[name][1]))


def matrix(packed: PackedAdapter, layer: int, name: str, column: int, sizes: tuple[int, int]) -> torch.Tensor:
    start = int(packed.directory[layer, LINEARS.index(name), column]) * UNIT
    return packed.buffer[start : start + sizes[0] * sizes[1]].view(sizes)


def test_adapters_of_one_header_share_a_blueprint(tmp_path: Path, drawn: list[Path]) -> None:
    """Two of one training run are inspected once, share their directory, and keep their own values."""
    load = Loader(SHAPE, torch.float32, 16).load
    first = load(write(tmp_path / "a", pairs(), config()))
    second = load(write(tmp_path / "b", scaled(pairs(), 3.0), config()))

    assert drawn == [tmp_path / "a"]
    assert second.directory is first.directory
    torch.testing.assert_close(second.buffer, 3 * first.buffer)


def test_what_differs_in_config_or_header_is_drawn_anew(tmp_path: Path, drawn: list[Path]) -> None:
    """alpha, rank and dtype are seen, though the files have equal names and the config has equal length."""
    load = Loader(SHAPE, torch.float32, 16).load
    first = load(write(tmp_path / "a", pairs(), config(lora_alpha=8)))
    other = load(write(tmp_path / "b", pairs(), config(lora_alpha=4)))
    load(write(tmp_path / "c", pairs(rank=2), config(rank=2)))
    load(write(tmp_path / "d", {name: one.half() for name, one in pairs().items()}, config()))

    assert [one.name for one in drawn] == ["a", "b", "c", "d"]
    torch.testing.assert_close(b_of(other, 1, "k_proj", 4) * 2, b_of(first, 1, "k_proj", 4))


def test_few_blueprints_are_kept(tmp_path: Path, drawn: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used goes; it is drawn again when it comes back."""
    monkeypatch.setattr(blueprint, "MAX_BLUEPRINTS", 2)
    load = Loader(SHAPE, torch.float32, 16).load
    for rank in (1, 2, 3):
        write(tmp_path / str(rank), pairs(rank=rank), config(rank=rank))
    for rank in (1, 2, 1, 3, 1, 2):
        load(tmp_path / str(rank))

    assert [one.name for one in drawn] == ["1", "2", "3", "2"]


def test_refusals_are_not_kept(tmp_path: Path, drawn: list[Path]) -> None:
    """What is above the limit is refused each time, and a long header is read though it is not kept."""
    load = Loader(SHAPE, torch.float32, 2).load
    write(tmp_path / "a", pairs(), config())
    for _ in range(2):
        with pytest.raises(AdapterError, match="rank"):
            load(tmp_path / "a")
    assert len(drawn) == 2


def test_a_long_header_is_not_kept(tmp_path: Path, drawn: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is inspected each time: what is kept is bounded."""
    monkeypatch.setattr(blueprint, "MAX_HEADER_BYTES", 100)
    load = Loader(SHAPE, torch.float32, 16).load
    write(tmp_path, pairs(), config())

    assert torch.equal(load(tmp_path).buffer, load(tmp_path).buffer)
    assert len(drawn) == 2


def test_threads_may_load_at_once(tmp_path: Path) -> None:
    """Many loads of few kinds in many threads give the bits that one thread gives."""
    for rank in (1, 2, 3):
        write(tmp_path / str(rank), pairs(rank=rank), config(rank=rank))
    expected = {rank: Loader(SHAPE, torch.bfloat16, 16).load(tmp_path / str(rank)).buffer for rank in (1, 2, 3)}
    shared, wrong = Loader(SHAPE, torch.bfloat16, 16), []

    def work() -> None:
        for turn in range(12):
            rank = turn % 3 + 1
            if not torch.equal(shared.load(tmp_path / str(rank)).buffer, expected[rank]):
                wrong.append(rank)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("span_bytes", [1, 3000, 4 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_pieces_give_the_bits_of_single_tensors(
    tmp_path: Path, dtype: torch.dtype, span_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pieces' length: files of mixed dtypes, a scale of its own for one module, and fused names pack to
    A, and B · scale rounded once."""
    monkeypatch.setattr(spans, "MAX_SPAN_BYTES", span_bytes)
    tensors = pairs(("o_proj", "down_proj"), rank=3)
    for layer in (0, 1):
        fused = key(layer, "qkv_proj")
        tensors[f"{fused}.lora_A.weight"], tensors[f"{fused}.lora_B.weight"] = torch.randn(3, 64), torch.randn(128, 3)
    for index, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].to((torch.float32, torch.bfloat16, torch.float16)[index % 3])
    targets = ("qkv_proj", "o_proj", "down_proj")
    settings = config(targets, rank=3, lora_alpha=4, alpha_pattern={"down_proj": 7})

    packed = Loader(SHAPE, dtype, 16).load(write(tmp_path, tensors, settings))

    for layer in (0, 1):
        for name, fused, first, scale in (
            ("q_proj", "qkv_proj", 0, 4 / 3), ("k_proj", "qkv_proj", 64, 4 / 3), ("v_proj", "qkv_proj", 96, 4 / 3),
            ("o_proj", "o_proj", 0, 4 / 3), ("down_proj", "down_proj", 0, 7 / 3),
        ):  # fmt: skip
            a, b = (tensors[f"{key(layer, fused)}.lora_{letter}.weight"].float() for letter in "AB")
            rows = b[first : first + SHAPE.linears[name][0]]
            assert torch.equal(a_of(packed, layer, name, 3), a.to(dtype))
            assert torch.equal(b_of(packed, layer, name, 3), (rows * np.float32(scale)).to(dtype))


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.3])
@pytest.mark.parametrize("target", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("source", ["BF16", "F16", "F32"])
def test_cast_is_the_same_in_pieces(source: str, target: str, scale: float) -> None:
    """An array of several pieces has the bits of torch's own conversion."""
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    wide = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(1)).to(dtypes[source])
    stored = wide.view(torch.int16).numpy().view("<u2") if source == "BF16" else wide.numpy()

    got = cast(stored, source, target, scale)

    expected = (wide.float() * np.float32(scale)).to(dtypes[target])
    given = torch.from_numpy(got.view("<i2")).view(torch.bfloat16) if target == "BF16" else torch.from_numpy(got)
    assert torch.equal(given, expected)
