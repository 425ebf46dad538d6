"""Prometheus families of what engines say of themselves: by replica, class, cause, kind, tier. Label sets are bounded;
lanes, which are not, are only in GET /admin/v1/engine. docs/operating.md lists the names: they are a contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.protocol import Stats
from gateway.replicas import ReplicaSet

CLASSES = ("interactive", "standard", "batch")
CAUSES = ("row", "blocks", "adapter")
STRUCTURED = (
    "adapters", "classes", "lanes", "preemptions", "failures", "arrivals", "kv_tiers", "resumed", "speeds",
)  # fmt: skip
TIER_COUNTERS = ("hits", "stores", "evictions", "faults")

Sample = tuple[tuple[str, ...], float]


def collect(replicas: ReplicaSet) -> Iterator[Metric]:
    """Every family, with a sample per engine that answers."""
    up = GaugeMetricFamily("chorus_engine_up", "1 if the engine answers", labels=["replica"])
    alive: dict[str, Stats] = {}
    for index, engine in enumerate(replicas.engines):
        up.add_metric([str(index)], float(engine.ready is not None))
        if engine.ready is not None and engine.stats is not None:
            alive[str(index)] = engine.stats
    yield up
    for name in Stats.__struct_fields__:
        if name not in ("boot_id", *STRUCTURED):
            flat: list[Sample] = [((index,), float(getattr(stats, name))) for index, stats in alive.items()]
            yield _family(f"chorus_engine_{name}", name.replace("_", " "), (), flat)
    for name, text, labels, read in _FAMILIES:
        samples: list[Sample] = [
            ((index, *values), number) for index, stats in alive.items() for values, number in read(stats)
        ]
        yield _family(f"chorus_engine_{name}", text, labels, samples)


def _running(stats: Stats) -> Iterator[Sample]:
    for one in stats.classes:
        yield (CLASSES[one.priority], "running"), one.running
        yield (CLASSES[one.priority], "paused"), one.paused
        yield (CLASSES[one.priority], "swapped"), one.swapped


def _waiting(stats: Stats) -> Iterator[Sample]:
    for one in stats.classes:
        for cause in CAUSES:
            yield (CLASSES[one.priority], cause), getattr(one, f"waiting_{cause}")


def _blocks(stats: Stats) -> Iterator[Sample]:
    yield ("device", "used"), stats.blocks_used
    yield ("device", "cached"), stats.blocks_cached
    yield ("device", "free"), stats.blocks_total - stats.blocks_used - stats.blocks_cached
    for tier in stats.kv_tiers:
        yield (tier.tier, "cached"), tier.blocks


def _tier_bytes(stats: Stats) -> Iterator[Sample]:
    for tier in stats.kv_tiers:
        yield (tier.tier, "used"), tier.bytes_used
        yield (tier.tier, "total"), tier.bytes_total


def _tier_events(stats: Stats) -> Iterator[Sample]:
    return (((tier.tier, name), getattr(tier, name)) for tier in stats.kv_tiers for name in TIER_COUNTERS)


def _resumed(stats: Stats) -> Iterator[Sample]:
    return (((how,), number) for how, number in stats.resumed.items())


def _speeds(stats: Stats) -> Iterator[Sample]:
    return (((of,), number) for of, number in stats.speeds.items())


def _preemptions(stats: Stats) -> Iterator[Sample]:
    return (((kind,), number) for kind, number in stats.preemptions.items())


def _failures(stats: Stats) -> Iterator[Sample]:
    return (((code,), number) for code, number in sorted(stats.failures.items()))


def _arrivals(stats: Stats) -> Iterator[Sample]:
    return (((tier,), number) for tier, number in sorted(stats.arrivals.items()))


def _adapters(stats: Stats) -> Iterator[Sample]:
    states = Counter(one.state for one in stats.adapters)
    return (((state,), states[state]) for state in ("resident", "loading", "failed"))


_FAMILIES = (
    ("sequences", "sequences that run, or have run and can't now, by class", ("class", "state"), _running),
    ("waiting_for", "waiting sequences, by class and by what they wait for", ("class", "cause"), _waiting),
    ("blocks", "KV blocks, by tier and state", ("tier", "state"), _blocks),
    ("kv_tier_bytes", "bytes of KV blocks that left the device", ("tier", "state"), _tier_bytes),
    (
        "kv_tier_blocks_total",
        "KV blocks given, taken, forgotten and lost by host and disk",
        ("tier", "event"),
        _tier_events,
    ),
    ("resumed_total", "sequences that gave up their KV blocks and run again, by how", ("how",), _resumed),
    ("kv_speed", "bytes or tokens per second by which swap or recompute is chosen", ("of",), _speeds),
    ("preemptions_by_kind_total", "rows (pause) or memory (blocks, adapter) given up", ("kind",), _preemptions),
    ("failures_total", "requests refused or failed, by code", ("code",), _failures),
    ("requests_total", "requests taken, by where their adapter lay", ("tier",), _arrivals),
    ("adapters", "adapters known to the engine, by state", ("state",), _adapters),
)


def _family(name: str, text: str, labels: tuple[str, ...], samples: list[Sample]) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=("replica", *labels))
    for values, number in samples:
        family.add_metric(list(values), float(number))
    return family
