"""What the router counts: Prometheus series of one router, and the same numbers as a plain dict.

One instance per router, on a registry that is passed in. Must never know who reads it.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.requests import Outcome

_TTFT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 480)
_TPOT_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class RouterStats:
    """Counters only grow. Label values come from closed sets: outcomes, causes, policies, decisions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "paceline_router_requests", "Requests by how they ended.", ["outcome"], registry=registry
        )
        self._tokens = Counter("paceline_router_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self._redispatches = Counter(
            "paceline_router_redispatches", "Further attempts by cause.", ["cause"], registry=registry
        )
        self._decisions = Counter(
            "paceline_router_decisions",
            "Dispatches by policy and by where the prompt is computed.",
            ["policy", "decision"],
            registry=registry,
        )
        self._duplicates = Counter(
            "paceline_router_duplicate_tokens",
            "Token reports that were already delivered.",
            registry=registry,
        )
        self._conflicts = Counter(
            "paceline_router_duplicate_faults", "Token reports that contradict another.", registry=registry
        )
        self._late_events = Counter(
            "paceline_router_late_events", "Events of attempts that were already over.", registry=registry
        )
        self._canaries = Counter("paceline_router_canaries", "Canary runs.", ["outcome"], registry=registry)
        self._in_flight = Gauge("paceline_router_in_flight", "Requests being served.", registry=registry)
        self._ready_pairs = Gauge("paceline_router_ready_pairs", "Pairs that may be used.", registry=registry)
        self._kv_bytes = Counter("paceline_router_kv_bytes", "KV bytes handed over.", registry=registry)
        self._ttft = Histogram(
            "paceline_router_ttft_seconds", "Time to first token.", buckets=_TTFT_S, registry=registry
        )
        self._tpot = Histogram(
            "paceline_router_tpot_seconds",
            "Time per output token after the first.",
            buckets=_TPOT_S,
            registry=registry,
        )
        self._duration = Histogram(
            "paceline_router_request_seconds", "Whole requests.", buckets=_TTFT_S, registry=registry
        )

    def started(self) -> None:
        self._in_flight.inc()

    def refused(self, code: str) -> None:
        """A request that never got in flight."""
        self._requests.labels(code).inc()

    def ended(self, outcome: str, *, seconds: float) -> None:
        """`outcome` is a finish reason, an error code, or "closed" when the consumer left."""
        self._in_flight.dec()
        self._requests.labels(outcome).inc()
        self._duration.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def produced(self, *, num_prompt_tokens: int, num_output_tokens: int, decode_seconds: float) -> None:
        """Once per request that got tokens, whole or not; `decode_seconds` from first to last token."""
        self._tokens.labels("prompt").inc(num_prompt_tokens)
        self._tokens.labels("output").inc(num_output_tokens)
        if num_output_tokens > 1:
            self._tpot.observe(decode_seconds / (num_output_tokens - 1))

    def finished(self, outcome: Outcome) -> None:
        self._tokens.labels("cached").inc(outcome.cached_tokens)
        self._tokens.labels("drafted").inc(outcome.drafted)
        self._tokens.labels("accepted").inc(outcome.accepted)
        self._kv_bytes.inc(outcome.kv_bytes)

    def redispatched(self, cause: str) -> None:
        self._redispatches.labels(cause).inc()

    def decided(self, policy: str, decision: str) -> None:
        self._decisions.labels(policy, decision).inc()

    def duplicates(self, count: int) -> None:
        self._duplicates.inc(count)

    def conflict(self) -> None:
        self._conflicts.inc()

    def late_event(self) -> None:
        self._late_events.inc()

    def canary(self, outcome: str) -> None:
        self._canaries.labels(outcome).inc()

    def ready_pairs(self, count: int) -> None:
        self._ready_pairs.set(count)

    def snapshot(self) -> dict[str, float]:
        """Every series of this registry that is the router's, "name{label=value}" to value."""
        values: dict[str, float] = {}
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.startswith("paceline_router_") and not sample.name.endswith("_created"):
                    labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                    values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return values
