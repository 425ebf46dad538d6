"""EngineCore: add · abort · step. The turn of the route: tokens in from one side, tokens out of the other.

One thread. Knows no socket; knows the model only through its Runner.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from adapters.residency import ResidencyCache
from adapters.spec import AdapterError, AdapterRef
from engine.block_pool import BlockPool
from engine.census import take_census
from engine.kv_owners import KVOwners
from engine.protocol import Accepted, Chunk, Failed, Generate, Stats
from engine.scheduler import Scheduler
from engine.step import Runner

DISK_POLL_S = 0.002


class EngineCore:
    """can_run: False when the last step found nothing to run and nothing has arrived since: a good time to `wait`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        residency: ResidencyCache,
        pool: BlockPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.can_run = False
        self.num_steps = 0
        self._scheduler = scheduler
        self._tiers = scheduler.tiers
        self._runner = runner
        self._residency = residency
        self._pool = pool
        self._owners = KVOwners(pool, scheduler.tiers)
        self._clock = clock

    @property
    def has_work(self) -> bool:
        """Requests are under way, something is left to say about them, or an adapter is being loaded."""
        return self._scheduler.has_work or self._residency.is_loading

    def add(self, request: Generate) -> Accepted:
        """Takes a request in. Raises Refused when it can't run or no more may wait."""
        tier = "" if request.adapter is None else self._residency.tier(request.adapter.digest)
        self._scheduler.add(request, self._clock())
        self._owners.note(request.owner)
        self._scheduler.num_arrivals[tier or "base"] += 1
        self.can_run = True
        return Accepted(request.id, tier)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Nothing more is said about this request; one choice alone finishes."""
        self._scheduler.abort(request_id, choice)
        self.can_run = True

    def step(self) -> list[Chunk | Failed]:
        """One step of the model, if anything can run; what there is to say afterwards."""
        step = self._scheduler.schedule(self._clock())
        self.can_run = step is not None
        if step is None:
            return self._scheduler.take_outbox()
        self.num_steps += 1
        started = self._clock()
        sampled = self._runner.run(step)
        self._tiers.cost.note_step(step.num_tokens, len(step.rows), self._clock() - started)
        return self._scheduler.commit(step, sampled)

    def warm(self, ref: AdapterRef) -> None:
        """Loads the adapter soon, if there is room, also if it has failed before; one that can't be loaded is for its
        requests to report."""
        self._residency.forgive(ref.digest)
        with contextlib.suppress(AdapterError):
            self._residency.check(ref, self._clock())
            self._residency.prefetch(ref, self._clock())

    def evict(self, digest: str) -> None:
        """Frees the adapter as soon as no request uses it."""
        self._residency.evict(digest)

    def keep(self, refs: list[AdapterRef]) -> None:
        """These adapters and no others are to stay in memory, as far as pins may."""
        self._residency.keep(refs, self._clock())

    def keep_owners(self, owners: list[bytes]) -> None:
        """KV blocks of all others are forgotten, on every tier."""
        self._owners.keep(owners, (request.message.owner for request in self._scheduler.requests.values()))

    def wait(self, timeout_s: float) -> None:
        """Sleeps until an adapter has loaded or the time is over; not for long while the disk reads KV blocks. Not at
        all if there is something to run."""
        if not self.can_run:
            is_reading = self._tiers.disk is not None and self._tiers.disk.is_reading
            self._residency.wait(min(timeout_s, DISK_POLL_S) if is_reading else timeout_s)

    def stats(self, boot_id: str) -> Stats:
        return take_census(boot_id, self._clock(), self.num_steps, self._scheduler, self._residency, self._pool)

    def close(self) -> None:
        """Lets the threads end that read adapters and KV blocks."""
        self._residency.close()
        self._tiers.close()
