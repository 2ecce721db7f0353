"""What a metric is, and how a table of them with its readings becomes Prometheus text.

Owns the kinds, the rule by which readings find their metric, and the text. Must never know which metrics
there are: every process brings its own table.

A reading has a key: the `source` of its metric. Where the source ends with `*`, what the key has in place of
the `*`, split at `/`, are the values of the metric's labels; only the first may itself contain a `/`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from wire.tally import Distribution

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ValueT = TypeVar("ValueT")
Kind = Literal["counter", "gauge", "histogram"]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the table. `name` as it is scraped, so that of a counter ends with `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"name must end with _total exactly for a counter, got {self.name!r}")


def counter(name: str, source: str, text: str, *labels: str) -> Metric:
    """A line of a table, short enough to be read as one."""
    return Metric(name=name, kind="counter", help=text, labels=labels, source=source)


def gauge(name: str, source: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", help=text, labels=labels, source=source)


def histogram(name: str, source: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="histogram", help=text, labels=labels, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything one scrape knows, by key."""

    values: Mapping[str, float]
    distributions: Mapping[str, Distribution]


def exposition(table: Sequence[Metric], readings: Readings, *, constant: Mapping[str, str]) -> bytes:
    """Prometheus text; every series bears the labels of `constant` besides its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(list(families(table, readings, constant=constant))))
    return generate_latest(registry)


def families(table: Iterable[Metric], readings: Readings, *, constant: Mapping[str, str]) -> Iterator[Family]:
    """One family for every metric of the table, also where there is no reading yet."""
    for metric in table:
        names = [*constant, *metric.labels]
        match metric.kind:
            case "histogram":
                ranges = HistogramMetricFamily(metric.name, metric.help, labels=names)
                for labels, distribution in _found(metric, readings.distributions):
                    buckets, total = _cumulative(distribution), distribution.total
                    ranges.add_metric([*constant.values(), *labels], buckets, total)
                yield ranges
            case _:
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                simple = family(metric.name, metric.help, labels=names)
                for labels, value in _found(metric, readings.values):
                    simple.add_metric([*constant.values(), *labels], value)
                yield simple


def _found(metric: Metric, readings: Mapping[str, ValueT]) -> Iterator[tuple[list[str], ValueT]]:
    """The readings of a metric, with the values of its labels."""
    if not metric.source.endswith("*"):
        if metric.source in readings:
            yield [], readings[metric.source]
        return
    prefix = metric.source[:-1]
    for key, value in readings.items():
        if key.startswith(prefix):
            labels = key[len(prefix) :].rsplit("/", len(metric.labels) - 1)
            if len(labels) == len(metric.labels):
                yield labels, value


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: each counts everything up to its bound."""
    seen, buckets = 0, []
    for bound, count in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
    return buckets


class _Given(Collector):
    def __init__(self, found: list[Family]) -> None:
        self._found = found

    def collect(self) -> Iterator[Family]:
        yield from self._found
