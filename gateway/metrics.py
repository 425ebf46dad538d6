"""Metrics: counters of all workers in one Redis hash, so that a scrape of any worker sees the sum and a restart of one
loses nothing that was flushed; gauges straight from the engines. Exposed in Prometheus' text format."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway import engine_metrics
from gateway.replicas import ReplicaSet
from tenants.db import StateUnavailable
from tenants.periodic import Periodic
from tenants.state import Client

KEY = "chorus:metrics"
FLUSH_S = 1.0
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True)
class Family:
    """A counter, or a histogram of seconds."""

    help: str
    labels: tuple[str, ...] = ()
    is_histogram: bool = False


FAMILIES = {
    "chorus_requests": Family("HTTP requests answered", ("route", "status")),
    "chorus_request_seconds": Family("from the request to the end of its answer", ("route",), True),
    "chorus_first_token_seconds": Family("from the request to its first token", (), True),
    "chorus_tokens": Family("tokens of finished attempts: prompt (cached included), cached, completion", ("kind",)),
    "chorus_limits_let_through": Family(
        "requests above a limit that only counts (soft) or only watches (shadow)", ("scope", "limit", "mode")
    ),
    "chorus_source_adapters": Family(
        "adapters of watched sources: taken, failed (once per content), removed", ("outcome",)
    ),
    "chorus_source_looks": Family("looks at watched sources: ok, error", ("outcome",)),
    "chorus_attempts": Family("finished attempts at an engine", ("status",)),
}


class Metrics(Periodic):
    """One worker's counters. `async with metrics:` flushes them every second."""

    def __init__(self, redis: Client) -> None:
        super().__init__(self.flush, FLUSH_S)
        self._redis = redis
        self._new: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, *labels: str, value: float = 1.0) -> None:
        """Count `value` in FAMILIES[name]."""
        self._new[_field(name, labels, "")] += value

    def observe(self, name: str, *labels: str, seconds: float) -> None:
        """One observation of a histogram."""
        bucket = bisect_left(SECONDS, seconds)
        self._new[_field(name, labels, str(bucket))] += 1
        self._new[_field(name, labels, "sum")] += seconds

    async def flush(self) -> None:
        """Raises RedisUnavailable; then nothing is lost."""
        if not self._new:
            return
        pipe = self._redis.pipeline(transaction=True)
        sending, self._new = self._new, defaultdict(float)
        for field, value in sending.items():
            pipe.hincrbyfloat(KEY, field, value)
        try:
            await pipe.execute()
        except BaseException:
            for field, value in sending.items():
                self._new[field] += value
            raise

    async def render(self, replicas: ReplicaSet) -> bytes:
        """Everything, as text. Without Redis the sums are unknown: then only gauges, and chorus_redis_up 0."""
        totals: dict[str, float] = {}
        is_up = True
        try:
            await self.flush()
            totals = {field: float(value) for field, value in (await self._redis.hgetall(KEY)).items()}
        except StateUnavailable:
            is_up = False
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(totals, is_up, replicas))
        return generate_latest(registry)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        with contextlib.suppress(StateUnavailable):
            await self.flush()


@lru_cache(4096)
def _field(name: str, labels: tuple[str, ...], part: str) -> str:
    return json.dumps([name, list(labels), part], separators=(",", ":"))


class _Collector:
    """What prometheus_client asks for at a scrape."""

    def __init__(self, totals: dict[str, float], is_up: bool, replicas: ReplicaSet) -> None:
        self._parts: defaultdict[str, defaultdict[tuple[str, ...], dict[str, float]]]
        self._parts = defaultdict(lambda: defaultdict(dict))
        for field, value in totals.items():
            name, labels, part = json.loads(field)
            self._parts[name][tuple(labels)][part] = value
        self._is_up = is_up
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        for name, family in FAMILIES.items():
            yield (
                _histogram(name, family, self._parts[name])
                if family.is_histogram
                else _counter(name, family, self._parts[name])
            )
        yield GaugeMetricFamily("chorus_redis_up", "1 if Redis answers", value=float(self._is_up))
        yield from engine_metrics.collect(self._replicas)


def _counter(name: str, family: Family, values: dict[tuple[str, ...], dict[str, float]]) -> Metric:
    metric = CounterMetricFamily(name, family.help, labels=family.labels)
    for labels, parts in sorted(values.items()):
        metric.add_metric(labels, parts.get("", 0.0))
    return metric


def _histogram(name: str, family: Family, values: dict[tuple[str, ...], dict[str, float]]) -> Metric:
    metric = HistogramMetricFamily(name, family.help, labels=family.labels)
    for labels, parts in sorted(values.items()):
        total, buckets = 0.0, []
        for index, bound in enumerate((*map(str, SECONDS), "+Inf")):
            total += parts.get(str(index), 0.0)
            buckets.append((bound, total))
        metric.add_metric(labels, buckets, sum_value=parts.get("sum", 0.0))
    return metric
