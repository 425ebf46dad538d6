"""Adapters and their versions as JSON objects: what they are, whether they are sound, where they are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from adapters.quota import AdapterUse
from adapters.records import SHARED, Adapter, Version
from adapters.spec import AdapterError
from adapters.validation import describe
from gateway.admin.bodies import unix
from gateway.state import State


def as_object(adapter: Adapter, version: Version) -> dict[str, Any]:
    """An adapter in one of its versions."""
    canary = adapter.canary
    return {
        "object": "adapter",
        "id": adapter.name,
        "tenant": adapter.tenant_id or None,
        **version_object(version),
        "status": "ready",
        "current_version": adapter.current,
        "previous_version": adapter.previous,
        "canary": None if canary is None else {"version": canary.version, "percent": canary.percent},
        "aliases": dict(adapter.aliases),
        "num_probes": len(adapter.probes),
    }


async def with_health(state: State, adapter: Adapter) -> dict[str, Any]:
    """The adapter in its current version."""
    version = adapter.version()
    return as_object(adapter, version) | {"tier": _tier(state, version.digest)} | await health(state, version)


async def in_full(state: State, adapter: Adapter) -> dict[str, Any]:
    """With all its versions."""
    versions = [
        version_object(version)
        | await health(state, version)
        | {"is_current": version.version == adapter.current, "resident": _residency(state, version.digest)}
        for version in adapter.versions
    ]
    details = await asyncio.to_thread(_details, state, adapter.version().digest)
    return await with_health(state, adapter) | details | {"versions": versions}


async def last_used(state: State, owner: str, found: Sequence[Adapter]) -> Callable[[Adapter], dict[str, Any]]:
    """The day (UTC) on which any version of an adapter answered last: its owner, or anybody if it is shared."""
    digests = {version.digest for adapter in found for version in adapter.versions}
    days = await state.ledger.last_days(digests, None if owner == SHARED else owner)

    def of(adapter: Adapter) -> dict[str, Any]:
        used = [days[version.digest] for version in adapter.versions if version.digest in days]
        return {"last_used_on": max(used).isoformat() if used else None}

    return of


async def health(state: State, version: Version) -> dict[str, Any]:
    """Failed, with the reason and its code, when its files are damaged or it is for another base model."""
    if not version.fits(state.shape.fingerprint):
        reason = "it was made for another base model than is served now"
        return {"status": "failed", "reason": reason, "reason_code": "base_mismatch"}
    problem = await asyncio.to_thread(state.store.problem, version.digest)
    if problem is not None:
        return {"status": "failed", "reason": problem, "reason_code": "adapter_damaged"}
    return {"status": "ready"}


def version_object(version: Version) -> dict[str, Any]:
    return {
        "version": version.version,
        "digest": f"sha256:{version.digest}",
        "rank": version.rank,
        "target_modules": list(version.target_modules),
        "num_modules": version.num_modules,
        "num_tensors": version.num_tensors,
        "size_bytes": version.size_bytes,
        "base_model": version.base_model,
        "warnings": list(version.warnings),
        "companions": [name for name, _ in version.companions],
        "companion_sums": dict(version.companions),
        "created_at": unix(version.created_at),
    }


def quota_object(use: AdapterUse) -> dict[str, Any]:
    return {
        "adapters": {"limit": use.limits.count, "used": use.count},
        "bytes": {"limit": use.limits.bytes, "used": use.bytes},
    }


def _details(state: State, digest: str) -> dict[str, Any]:
    """As the stored files say: what B·A is multiplied by, module by module; how many of the tensors are applied (the
    others are copies of the base's own, and warned of). Nothing when they are damaged."""
    try:
        with state.store.outline(digest) as directory:
            spec = describe(directory, state.shape)
    except (AdapterError, OSError):
        return {}
    applied = {name for module in spec.modules for name in module.tensors}
    scales = sorted({round(module.scale, 6) for module in spec.modules if module.rank})
    return {"scales": scales, "applied": f"{len(applied)}/{spec.num_tensors}"}


def _tier(state: State, digest: str) -> str:
    """Where it lies for the engine that has it nearest: resident, loading, failed, or disk."""
    states = {found["state"] for found in _residency(state, digest)}
    return next((tier for tier in ("resident", "loading", "failed") if tier in states), "disk")


def _residency(state: State, digest: str) -> list[dict[str, Any]]:
    """Where it is, as the engines last said: state is loading, resident or failed."""
    return [
        {"engine": index, "state": found.state, "num_running": found.num_pins}
        for index, engine in enumerate(state.replicas.engines)
        for found in (engine.stats.adapters if engine.stats else ())
        if found.digest == digest
    ]
