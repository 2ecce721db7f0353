"""What the router counts. Plain numbers by key; `router.metrics` has the names they are scraped under.

One instance per router. Must never know who reads it.
"""

from collections import Counter
from collections.abc import Mapping

from router.metrics import ROUTER_METRICS, VLLM_ROUTER_METRICS
from router.recent import Recent
from router.requests import Outcome, Summary
from wire.metric import Readings, exposition, families
from wire.tally import TOKEN_SECONDS, Distribution, Tallies

_STAGES = ("queue", "prefill", "transfer", "decode")
_TOKENS = tuple(f"tokens/{kind}" for kind in ("prompt", "cached", "output", "drafted", "accepted"))
_COUNTS = (
    "in_flight",
    "queue_requests",
    "queue_bytes",
    "ready_pairs",
    "prefix_pages",
    "believed_cached",
    "duplicates",
    "conflicts",
    "late_events",
    "kv_bytes",
    "drafted_rounds",
    "degraded/redispatch",
)
_SUCCESSES = {"stop": "stop", "length": "length", "closed": "abort"}
"""How a request may end without being to blame, in vLLM's words."""


class RouterStats:
    """Counters only grow. Label values come from closed sets: outcomes, causes, policies, decisions."""

    def __init__(self) -> None:
        self.recent = Recent()
        self._values: Counter[str] = Counter(dict.fromkeys((*_COUNTS, *_TOKENS), 0))
        self._times = Tallies(
            *("ttft_s", "request_s", "queue_s"),
            *(f"stage_s/{stage}" for stage in _STAGES),
            bounds={"tpot_s": TOKEN_SECONDS, "itl_s": TOKEN_SECONDS},
        )

    def started(self) -> None:
        self._values["in_flight"] += 1

    def refused(self, code: str) -> None:
        """A request that never got in flight."""
        self._values[f"requests/{code}"] += 1

    def ended(self, outcome: str, *, seconds: float) -> None:
        """`outcome` is a finish reason, an error code, or "closed" when the consumer left."""
        self._values["in_flight"] -= 1
        self._values[f"requests/{outcome}"] += 1
        if outcome in _SUCCESSES:
            self._values[f"success/{_SUCCESSES[outcome]}"] += 1
        self._times.observe("request_s", seconds)

    def queue(self, num_waiting: int, *, num_bytes: int) -> None:
        """What waits now."""
        self._values["queue_requests"] = num_waiting
        self._values["queue_bytes"] = num_bytes

    def waited(self, seconds: float) -> None:
        """A request that had to wait may start."""
        self._times.observe("queue_s", seconds)

    def first_token(self, seconds: float) -> None:
        self._times.observe("ttft_s", seconds)

    def produced(self, *, num_prompt_tokens: int, num_output_tokens: int, decode_seconds: float) -> None:
        """Once per request that got tokens, whole or not; `decode_seconds` from first to last token."""
        self._values["tokens/prompt"] += num_prompt_tokens
        self._values["tokens/output"] += num_output_tokens
        if num_output_tokens > 1:
            self._times.observe("tpot_s", decode_seconds / (num_output_tokens - 1))

    def finished(self, outcome: Outcome) -> None:
        self._values["tokens/cached"] += outcome.cached_tokens
        self._values["kv_bytes"] += outcome.kv_bytes
        timings = outcome.timings
        stages = (timings.queue_s, timings.prefill_s, timings.transfer_s, timings.decode_s)
        for stage, seconds in zip(_STAGES, stages, strict=True):
            if stage != "transfer" or outcome.transport:
                self._times.observe(f"stage_s/{stage}", seconds)

    def left(self, summary: Summary) -> None:
        """Once per request that was in flight, however it ended."""
        self._values["tokens/drafted"] += summary.drafted
        self._values["tokens/accepted"] += summary.accepted
        self._values["drafted_rounds"] += sum(summary.acceptance.values())
        for num_accepted, num_rounds in summary.acceptance.items():
            for position in range(num_accepted):
                self._values[f"accepted_at/{position}"] += num_rounds
        self._times.merge("itl_s", summary.gaps)
        self.recent.add(summary)

    def value(self, key: str) -> float:
        """One number as it is now; 0 for what never happened."""
        return self._values.get(key, 0)

    def prefix_pages(self, count: int) -> None:
        """Cached pages of all nodes that are known here."""
        self._values["prefix_pages"] = count

    def believed_cached(self, num_tokens: int) -> None:
        """Once per dispatch: prompt tokens that the chosen node is believed to have."""
        self._values["believed_cached"] += num_tokens

    def redispatched(self, cause: str) -> None:
        self._values[f"redispatches/{cause}"] += 1
        self._values["degraded/redispatch"] += 1

    def decided(self, policy: str, decision: str) -> None:
        self._values[f"decisions/{policy}/{decision}"] += 1

    def duplicates(self, count: int) -> None:
        self._values["duplicates"] += count

    def conflict(self) -> None:
        self._values["conflicts"] += 1

    def late_event(self) -> None:
        self._values["late_events"] += 1

    def canary(self, outcome: str) -> None:
        self._values[f"canaries/{outcome}"] += 1

    def ready_pairs(self, count: int) -> None:
        self._values["ready_pairs"] = count

    def answered(self, route: str, *, method: str, status: int, seconds: float) -> None:
        """One HTTP request; `route` is the server's pattern, never the path that was asked for."""
        self._values[f"http/{route}/{method}/{status}"] += 1
        self._times.observe(f"http_s/{route}", seconds)

    def text(
        self, *, model: str, now: Mapping[str, float], distributions: Mapping[str, Distribution]
    ) -> bytes:
        """Prometheus text; `now` and `distributions` are what others know at this moment, by key."""
        readings = Readings(
            values={**self._values, **now}, distributions={**self._times.read(), **distributions}
        )
        ours = exposition(ROUTER_METRICS, readings, constant={})
        return ours + exposition(VLLM_ROUTER_METRICS, readings, constant={"model_name": model})

    def snapshot(self) -> dict[str, float]:
        """Every series counted here, "name{label=value}" to value."""
        values: dict[str, float] = {}
        readings = Readings(values=self._values, distributions=self._times.read())
        for family in families(ROUTER_METRICS, readings, constant={}):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return values
