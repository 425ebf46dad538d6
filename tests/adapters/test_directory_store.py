"""What only a DirectoryStore does: it hashes what is stored, and its files are read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.storage import WEIGHTS_FILE, DirectoryStore
from tests.adapters.stored import put


def test_damage_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking again at what is sound costs no second reading, until it changes."""
    store = DirectoryStore(tmp_path)
    digest = put(store)
    assert store.problem(digest) is None
    path = store.path(digest) / WEIGHTS_FILE
    assert not path.stat().st_mode & 0o222

    with monkeypatch.context() as patch:
        patch.setattr("adapters.storage.content_digest", lambda _: pytest.fail("read twice"))
        assert store.problem(digest) is None
    path.chmod(0o644)
    path.write_bytes(b"WEIGHTS")
    assert store.problem(digest) is not None
