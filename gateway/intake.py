"""check_in(): from a filled stage to a checked adapter in the store, however it came into the stage. No names yet."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from adapters.new_tokens import keep_new_tokens
from adapters.records import Stored
from adapters.spec import AdapterSpec, AdapterTooLarge
from adapters.storage import COMPANION_FILES
from adapters.validation import Limits, validate_in_subprocess
from gateway.state import State


async def check_in(state: State, stage: Path) -> Stored:
    """The stage is still the caller's to discard. Raises AdapterError, OSError."""
    limits = Limits(max_rank=state.settings.max_lora_rank, max_bytes=state.settings.max_upload)
    async with state.uploads.checks:
        spec = await validate_in_subprocess(stage, state.shape, limits)
    _check_memory(state, spec)
    files = await asyncio.to_thread(_companions, stage, spec)
    profile = await asyncio.to_thread(state.inference.profiles.check, files, spec.num_added)
    spec = replace(spec, warnings=spec.warnings + profile.warnings)
    size_bytes = await asyncio.to_thread(_size, stage)
    digest = await asyncio.to_thread(state.store.commit, stage)
    return Stored(digest, spec, size_bytes, tuple((name, sha256(data).hexdigest()) for name, data in files.items()))


def _companions(stage: Path, spec: AdapterSpec) -> dict[str, bytes]:
    keep_new_tokens(stage, spec.new_tokens)
    return {name: (stage / name).read_bytes() for name in COMPANION_FILES if (stage / name).is_file()}


def _check_memory(state: State, spec: AdapterSpec) -> None:
    """What no engine that we know has room for would never serve. Raises AdapterTooLarge."""
    for ready in (engine.ready for engine in state.replicas.engines):
        if (
            ready is not None
            and spec.packed_bytes * (2 if ready.dtype == "float32" else 1) > ready.adapter_memory_bytes
        ):
            raise AdapterTooLarge(
                "adapter_too_large", f"the engine's adapter memory has only {ready.adapter_memory_bytes} bytes"
            )


def _size(stage: Path) -> int:
    return sum(path.stat().st_size for path in stage.iterdir())
