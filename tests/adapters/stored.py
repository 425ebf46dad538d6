"""Small adapters for the tests of stores: what is in them does not matter there."""

from __future__ import annotations

from pathlib import Path

from adapters.storage import CONFIG_FILE, WEIGHTS_FILE, AdapterStore

CONFIG = b'{"r": 8, "a": 1}'


def fill(stage: Path, weights: bytes = b"weights", config: bytes = CONFIG) -> Path:
    (stage / CONFIG_FILE).write_bytes(config)
    (stage / WEIGHTS_FILE).write_bytes(weights)
    return stage


def put(store: AdapterStore, weights: bytes = b"weights", config: bytes = CONFIG) -> str:
    """The digest of an adapter that is in the store now."""
    return store.commit(fill(store.stage(), weights, config))


def weights_of(store: AdapterStore, digest: str) -> bytes:
    with store.reading(digest) as directory:
        return (directory / WEIGHTS_FILE).read_bytes()
