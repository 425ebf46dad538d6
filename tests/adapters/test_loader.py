"""Packing: one buffer with every module at its true rank; what was damaged in the store is not loaded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from adapters import checksum
from adapters.loader import NUM_FIELDS, OFFSET_A, OFFSET_B, RANK, UNIT, Loader, load
from adapters.spec import LINEARS, MODULES, AdapterInvalid, AdapterRef, AdapterTooLarge
from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, DirectoryStore, content_digest, file_sha256
from adapters.validation import validate
from tests.adapters.files import LIMITS, SHAPE, config, pairs, write


def test_layout(tmp_path: Path) -> None:
    """The packed layout that kernels rely on: true ranks, nothing padded but to 64 bytes, extents that don't overlap,
    absent modules all zero, and the size that validation foretold."""
    tensors = pairs(["q_proj", "down_proj"], rank=3)
    spec = validate(write(tmp_path, tensors, config(("q_proj", "down_proj"), rank=3)), SHAPE, LIMITS)

    packed = load(tmp_path, SHAPE, torch.bfloat16, max_rank=16)

    assert packed.directory.shape == (2 + 1, len(MODULES), NUM_FIELDS)
    assert packed.directory.dtype == torch.int64
    assert packed.buffer.dtype == torch.bfloat16
    assert packed.size_bytes == packed.buffer.nbytes == spec.packed_bytes
    assert packed.rank == 3
    extents = []
    for layer in range(2):
        for index, name in enumerate(LINEARS):
            row = packed.directory[layer, index]
            if name not in ("q_proj", "down_proj"):
                assert not row.any()
                continue
            out_features, in_features = SHAPE.linears[name]
            assert row[RANK] == 3
            for column, width in ((OFFSET_A, in_features), (OFFSET_B, out_features)):
                start = int(row[column]) * UNIT
                assert (packed.buffer.data_ptr() + start * 2) % 64 == 0
                extents.append((start, start + 3 * width))
    assert not packed.directory[:, len(LINEARS) :].any()
    assert not packed.directory[2].any()
    extents.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(extents))
    assert extents[-1][1] <= packed.buffer.numel()


def test_equal_files_pack_to_equal_bits(tmp_path: Path) -> None:
    """Loading again after an eviction gives the same bits."""
    write(tmp_path, pairs(), config())
    first, second = (load(tmp_path, SHAPE, torch.float16, max_rank=16) for _ in range(2))

    assert torch.equal(first.buffer, second.buffer)
    assert torch.equal(first.directory, second.directory)


@pytest.mark.parametrize("has_checksum", [False, True])
@pytest.mark.parametrize("damage", ["flip", "cut", "config", "garbage", "gone"])
def test_a_damaged_stored_file_is_invalid(tmp_path: Path, damage: str, has_checksum: bool) -> None:
    """HS-16: whatever became of the stored files, loading them by digest says AdapterInvalid, nothing else."""
    write(tmp_path, pairs(), config())
    digest = content_digest(tmp_path)
    if has_checksum:
        checksum.write(tmp_path / WEIGHTS_FILE, file_sha256(tmp_path / WEIGHTS_FILE))
    load(tmp_path, SHAPE, torch.float32, max_rank=16, digest=digest)
    weights = tmp_path / WEIGHTS_FILE
    data = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        weights.write_bytes(data[:-100])
    elif damage == "config":
        (tmp_path / CONFIG_FILE).write_text(
            (tmp_path / CONFIG_FILE).read_text().replace('"lora_alpha": 8', '"lora_alpha": 9')
        )
    elif damage == "garbage":
        weights.write_bytes(b"\x00garbage" * 100)
    else:
        weights.unlink()

    with pytest.raises(AdapterInvalid):
        load(tmp_path, SHAPE, torch.float32, max_rank=16, digest=digest)


def test_what_was_committed_is_loaded_by_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sha256 of stored weights is not computed again."""
    store = DirectoryStore(tmp_path)
    ref = AdapterRef(store.commit(write(store.stage(), pairs(), config())), 4, 0)
    loader = Loader(SHAPE, torch.float32, max_rank=16)

    with monkeypatch.context() as patch:
        patch.setattr("adapters.storage.file_sha256", lambda path: pytest.fail(f"{path} was hashed"))
        loader.load_stored(store, ref)


@pytest.mark.parametrize("state", ["absent", "empty", "garbage", "of others", "of other weights", "a link"])
def test_a_checksum_that_says_nothing_is_no_damage(tmp_path: Path, state: str) -> None:
    """Weights without a checksum, or beside a damaged one, are known by their sha256."""
    write(tmp_path, pairs(), config())
    digest = content_digest(tmp_path)
    weights = tmp_path / WEIGHTS_FILE
    checksum.write(weights, file_sha256(weights))
    path = tmp_path / checksum.CHECKSUM_FILE
    line = path.read_text()
    path.unlink()
    if state == "a link":
        (tmp_path / "elsewhere").write_text(line)
        path.symlink_to(tmp_path / "elsewhere")
    elif state != "absent":
        path.write_text({
            "empty": "", "garbage": "\0" * 98, "of others": f"{'0' * 32}{line[32:]}",
            "of other weights": f"{line[:33]}{'0' * 64}\n",
        }[state])  # fmt: skip

    load(tmp_path, SHAPE, torch.float32, max_rank=16, digest=digest)


def test_a_neighbours_weights_with_their_checksum_are_damage(tmp_path: Path) -> None:
    """Sound files, but of another adapter: the digest covers what the checksum stands for."""
    store = DirectoryStore(tmp_path)
    negated = {name: -tensor for name, tensor in pairs().items()}
    own, other = (store.commit(write(store.stage(), tensors, config())) for tensors in (pairs(), negated))
    for name in (WEIGHTS_FILE, checksum.CHECKSUM_FILE):
        path = store.path(own) / name
        path.unlink()
        path.write_bytes((store.path(other) / name).read_bytes())

    with pytest.raises(AdapterInvalid):
        Loader(SHAPE, torch.float32, max_rank=16).load_stored(store, AdapterRef(own, 4, 0))


def test_without_a_digest_values_are_checked(tmp_path: Path) -> None:
    """A directory that nobody committed gets the whole check."""
    tensors = pairs()
    next(iter(tensors.values()))[0, 0] = float("nan")
    write(tmp_path, tensors, config())

    with pytest.raises(AdapterInvalid, match="NaN"):
        load(tmp_path, SHAPE, torch.float32, max_rank=16)


def test_the_engine_has_its_own_rank_limit(tmp_path: Path) -> None:
    """AL-31: an adapter above the engine's limit is refused when it is loaded, before anything is packed."""
    write(tmp_path, pairs(rank=8), config(rank=8))

    with pytest.raises(AdapterTooLarge):
        load(tmp_path, SHAPE, torch.float32, max_rank=4)
