"""SourceSync: brings the registry in line with one watched source, one look at a time.

What is new or changed, and has stood still from one look to the next, goes the way of an upload: sandbox, store,
registry, engines. What is refused is told of once, and looked at again when it changes, or the rules do. What has gone
is retired; requests that run on it end. Only what this source brought is replaced or retired: a name that was taken
before is a refusal, a version that somebody uploaded over ours stays until the source changes.

A source that shows nothing at all, where there was something, is taken for one that isn't mounted: nothing is retired.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from adapters.quota import AdapterQuotaExceeded
from adapters.records import SHARED, AdapterNotFound, NameTaken, RegistryError, Stored
from adapters.source_book import Key, Outcome, SourceBook, source_id
from adapters.sources import AdapterSource, Found, SourceError
from adapters.spec import AdapterError
from engine.protocol import EngineError
from gateway.admin.adapters import evict, warm
from gateway.errors import ApiError, to_api_error
from gateway.intake import check_in
from gateway.state import State
from tenants.audit import Actor
from tenants.db import StateUnavailable
from tenants.directory import TenantNotFound

log = logging.getLogger("chorus.gateway.sources")

ACTOR = Actor("source")
SHARED_DIRECTORY = "_shared"
"""The first directory of adapters that all tenants may call."""
AGAIN = frozenset(("tenant_not_found", "adapter_quota_exceeded"))
"""Refusals that end without any change of the files."""


@dataclass
class Look:
    """What one look at the source came to. `waiting` changed since the last look."""

    found: int = 0
    taken: int = 0
    failed: int = 0
    removed: int = 0
    waiting: int = 0


class SourceSync:
    """`place` is the source's own name; `source` reads it. One process at a time calls look()."""

    def __init__(self, state: State, place: str, source: AdapterSource) -> None:
        self._state = state
        self._place = place
        self._id = source_id(place)
        self._source = source
        self._book = SourceBook(state.database)
        self._seen: dict[Key, str] | None = None  # marks at the last look
        rules = (state.settings.max_lora_rank, state.settings.max_upload, state.shape.fingerprint)
        self._rules = repr(rules).encode()

    async def look(self) -> Look:
        """Raises OSError for a source that can't be read, StateUnavailable; what was done until then is done."""
        found = {Key(one.tenant, one.name): one for one in await asyncio.to_thread(self._source.scan)}
        known = await self._book.read(self._id)
        if known and not found:
            raise SourceError(f"there is nothing in it, where there were {len(known)} adapters: is it mounted?")
        before, marks = self._seen, {key: self._mark(one) for key, one in found.items()}
        self._seen = marks
        look = Look(found=len(found))
        for key, mark in marks.items():
            old = known.get(key, Outcome(""))
            if old.mark == mark and old.code not in AGAIN:
                continue
            if before is None or before.get(key) != mark:
                look.waiting += 1
                continue
            await self._take(key, found[key], old, look)
        if before is not None:
            for key in known.keys() - marks.keys() - before.keys():
                await self._remove(key, known[key])
                look.removed += 1
        return look

    def _mark(self, found: Found) -> str:
        return sha256(self._rules + found.mark.encode()).hexdigest()

    async def _take(self, key: Key, found: Found, old: Outcome, look: Look) -> None:
        mark = self._mark(found)
        try:
            digest = await self._publish(key, found, old)
        except (StateUnavailable, OSError, EngineError) as error:  # it may pass, and concerns this adapter only
            log.warning("%s/%s of source %s was not read: %s", key.tenant, key.name, self._place, error)
            look.waiting += 1
            return
        except (AdapterError, RegistryError, AdapterQuotaExceeded, TenantNotFound, ApiError) as error:
            answer = to_api_error(error)
            code = str(getattr(error, "code", answer.code))
            await self._refuse(key, old, Outcome(mark, old.digest, code, answer.message, answer.param))
            look.failed += 1
            return
        except Exception:  # our own fault must not keep others from being looked at
            log.exception("%s/%s of source %s was not taken", key.tenant, key.name, self._place)
            look.waiting += 1
            return
        await self._book.write(self._id, key, Outcome(mark, digest))
        look.taken += 1
        self._state.metrics.add("chorus_source_adapters", "taken")
        log.info("%s/%s of source %s is ready: %s", key.tenant, key.name, self._place, digest[:12])

    async def _refuse(self, key: Key, old: Outcome, new: Outcome) -> None:
        await self._book.write(self._id, key, new)
        if (old.mark, old.code) != (new.mark, new.code):
            self._state.metrics.add("chorus_source_adapters", "failed")
            log.warning(
                "%s/%s of source %s was refused: %s: %s", key.tenant, key.name, self._place, new.code, new.message
            )

    async def _publish(self, key: Key, found: Found, old: Outcome) -> str:
        """→ the digest that is current now because of the source."""
        registry = self._state.registry
        owner = await self._owner(key.tenant)
        registry.check_name(key.name)
        current = None
        with suppress(AdapterNotFound):
            current = await registry.get(owner, key.name)
        if current is not None and not old.digest:
            raise NameTaken("adapter_exists", "there is an adapter of this name that the source did not bring", "name")
        (await registry.use(owner)).check(int(current is None), sum(file.size for file in found.files))
        stored = await self._stored(found)
        if current is None:
            adapter = await registry.register(owner, key.name, stored, ACTOR)
        elif current.version().digest == stored.digest:
            return stored.digest
        else:
            await self._state.prober.checked(owner, key.name, stored, current.probes)
            adapter = await registry.replace(owner, key.name, stored, ACTOR)
        await warm(self._state, adapter.version().ref)
        return stored.digest

    async def _stored(self, found: Found) -> Stored:
        state = self._state
        stage = await asyncio.to_thread(state.store.stage)
        try:
            await asyncio.to_thread(self._source.copy, found, stage, state.settings.max_upload)
            return await check_in(state, stage)
        finally:
            await asyncio.shield(asyncio.to_thread(state.store.discard, stage))

    async def _owner(self, tenant: str) -> str:
        """Raises TenantNotFound."""
        return SHARED if tenant == SHARED_DIRECTORY else (await self._state.directory.get(tenant)).id

    async def _remove(self, key: Key, known: Outcome) -> None:
        owner = SHARED if key.tenant == SHARED_DIRECTORY else key.tenant
        with suppress(AdapterNotFound):
            adapter = await self._state.registry.get(owner, key.name)
            if known.digest in {version.digest for version in adapter.versions}:
                await evict(self._state, await self._state.registry.retire(owner, key.name, ACTOR))
                self._state.metrics.add("chorus_source_adapters", "removed")
                log.info("%s/%s is gone from source %s and retired", key.tenant, key.name, self._place)
        await self._book.forget(self._id, key)
