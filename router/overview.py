"""What operators may ask of a router: whether it can serve, its metrics, and what the live page shows.

Owns putting the parts' answers together. Must never know HTTP.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from router.pairs import PairBook
from router.stats import RouterStats
from wire.loop_lag import LoopLag
from wire.records import NodeRecord


class Work(Protocol):
    """What the dispatcher says of itself."""

    @property
    def num_in_flight(self) -> int: ...

    @property
    def is_draining(self) -> bool: ...


class RegistrySight(Protocol):
    """How well the registry is seen (wire.registry_view in production)."""

    @property
    def records(self) -> tuple[NodeRecord, ...]: ...

    @property
    def num_failures(self) -> int: ...

    @property
    def is_stale(self) -> bool: ...


class Overview:
    """Everything is read when it is asked for; nothing is kept here."""

    def __init__(
        self,
        *,
        work: Work,
        pairs: PairBook,
        stats: RouterStats,
        nodes: RegistrySight,
        lag: LoopLag,
        model: Callable[[], str],
        settings: Mapping[str, Any],
    ) -> None:
        self._work = work
        self._pairs = pairs
        self._stats = stats
        self._nodes = nodes
        self._lag = lag
        self._model = model
        self._settings = settings

    def report(self) -> dict[str, Any]:
        """What /ready shows."""
        report = self._pairs.report()
        is_draining = self._work.is_draining
        return {**report, "ready": report["ready"] and not is_draining, "draining": is_draining}

    def settings(self) -> dict[str, Any]:
        """What /server_info shows."""
        return dict(self._settings)

    def metrics(self) -> bytes:
        """Prometheus text."""
        pairs = Counter(pair["state"] for pair in self._pairs.report()["pairs"])
        now = {
            **{f"pairs/{state}": float(count) for state, count in pairs.items()},
            **_loads(self._nodes.records),
            "kv_usage": _kv_usage(self._nodes.records),
            "draining": float(self._work.is_draining),
            "registry_stale": float(self._nodes.is_stale),
            "degraded/registry_away": float(self._nodes.num_failures),
        }
        return self._stats.text(model=self._model(), now=now, distributions={"loop_lag_s": self._lag.read()})

    def targets(self) -> list[dict[str, Any]]:
        """The nodes' own /metrics, as Prometheus' `http_sd_configs` wants to be told."""
        return [
            {"targets": [record.metrics_address], "labels": {"role": record.role, "model": record.model}}
            for record in sorted(self._nodes.records, key=lambda record: (record.role, record.address))
            if record.metrics_address
        ]

    def feed(self) -> dict[str, Any]:
        """What the live page shows. Ids and numbers only, whatever users sent."""
        now = asyncio.get_running_loop().time()
        recent = self._stats.recent
        return {
            "model": self._model(),
            **self.report(),
            "registry_stale": self._nodes.is_stale,
            "in_flight": self._work.num_in_flight,
            "queued": self._stats.value("queue_requests"),
            "loop_lag_s": self._lag.last_s,
            "flows": recent.flows(),
            "series": recent.series(now=now),
            "requests": recent.requests(now=now),
        }

    def answered(self, route: str, *, method: str, status: int, seconds: float) -> None:
        """One HTTP request is over."""
        self._stats.answered(route, method=method, status=status, seconds=seconds)


def _loads(records: tuple[NodeRecord, ...]) -> Mapping[str, float]:
    values: dict[str, float] = {}
    for record in records:
        node, load = f"{record.role}/{record.address}", record.load
        values[f"node_running/{node}"] = load.running
        values[f"node_waiting/{node}"] = load.waiting
        values[f"node_free/{node}"] = load.free_pages
        values[f"node_pages/{node}"] = load.total_pages
    return values


def _kv_usage(records: tuple[NodeRecord, ...]) -> float:
    decodes = [record.load for record in records if record.role == "decode"]
    total = sum(load.total_pages for load in decodes)
    return 1 - sum(load.free_pages for load in decodes) / total if total else 0.0
