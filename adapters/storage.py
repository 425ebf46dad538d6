"""AdapterStore: where adapters lie, by digest. Knows no names, tenants or tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class AdapterStore(Protocol):
    """Four methods between us and the disk or bucket. What is committed never changes.

    stage()               a fresh private directory to write CONFIG_FILE and WEIGHTS_FILE into
    commit(stage)         → digest; atomic: either store/<digest>/ is whole, or nothing happened. The digest is
                          sha256(canonical config ‖ sha256(weights)); committing equal content again is a no-op
    path(digest)          the directory that holds its files (read only); AdapterMissing if there is none
    delete(digest)        gone, or was never there
    """

    def stage(self) -> Path: ...
    def commit(self, stage: Path) -> str: ...
    def path(self, digest: str) -> Path: ...
    def delete(self, digest: str) -> None: ...
