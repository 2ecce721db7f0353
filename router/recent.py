"""What happened lately, for people who look: the last requests, the last minutes, the flow between pairs.

Owns bounded memories, nothing else: however long a router runs, they take the same room. Holds ids and
numbers, never text. Must never know who looks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.requests import Summary

BUCKET_S = 5.0
NUM_BUCKETS = 120
NUM_REQUESTS = 100
_MAX_SAMPLES = 256
_MAX_FLOWS = 1024


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """A few seconds. The first values stand for all of them where there are more than fit."""

    number: int
    requests: int = 0
    failures: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Flow:
    num_bytes: int = 0
    num_requests: int = 0


class Recent:
    """Time is the loop's, as summaries bear it; a reader says what it is now."""

    def __init__(self) -> None:
        self._requests: deque[Summary] = deque(maxlen=NUM_REQUESTS)
        self._buckets: deque[_Bucket] = deque(maxlen=NUM_BUCKETS)
        self._flows: dict[tuple[str, str], _Flow] = {}

    def add(self, summary: Summary) -> None:
        self._requests.append(summary)
        self._note_bucket(summary)
        if summary.kv_bytes:
            pair = (summary.prefill_node, summary.decode_node)
            flow = self._flows[pair] = self._flows.pop(pair, _Flow())  # the last to go
            flow.num_bytes += summary.kv_bytes
            flow.num_requests += 1
            while len(self._flows) > _MAX_FLOWS:
                del self._flows[next(iter(self._flows))]

    def requests(self, *, now: float) -> list[dict[str, Any]]:
        """The newest first. Offsets of the stages count from the request's arrival."""
        return [_shown(summary, now) for summary in reversed(self._requests)]

    def flows(self) -> list[dict[str, Any]]:
        """KV bytes handed from each prefill node to each decode node, in all."""
        return [
            {"prefill": prefill, "decode": decode, "bytes": flow.num_bytes, "requests": flow.num_requests}
            for (prefill, decode), flow in sorted(self._flows.items())
        ]

    def series(self, *, now: float) -> list[dict[str, Any]]:
        """The last minutes, oldest first, without the moments in which nothing ended. `ago_s`: the age of
        the middle of the bucket."""
        oldest = now // BUCKET_S - NUM_BUCKETS
        return [
            {
                "ago_s": round(now - (bucket.number + 0.5) * BUCKET_S, 1),
                "requests": bucket.requests,
                "failures": bucket.failures,
                "output_tokens": bucket.output_tokens,
                "ttft_p50_s": _quantile(bucket.ttft_s, 0.5),
                "ttft_p95_s": _quantile(bucket.ttft_s, 0.95),
                "tpot_p50_s": _quantile(bucket.tpot_s, 0.5),
                "tpot_p95_s": _quantile(bucket.tpot_s, 0.95),
                "acceptance": bucket.accepted / bucket.drafted if bucket.drafted else None,
                "mean_accepted": bucket.accepted / bucket.rounds if bucket.rounds else None,
            }
            for bucket in self._buckets
            if bucket.number > oldest
        ]

    def _note_bucket(self, summary: Summary) -> None:
        number = int(summary.ended_at // BUCKET_S)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(_Bucket(number=number))
        bucket = self._buckets[-1]
        bucket.requests += 1
        bucket.failures += summary.is_failure
        bucket.output_tokens += summary.num_output_tokens
        bucket.drafted += summary.drafted
        bucket.accepted += summary.accepted
        bucket.rounds += sum(summary.acceptance.values())
        if summary.ttft_s is not None and len(bucket.ttft_s) < _MAX_SAMPLES:
            bucket.ttft_s.append(summary.ttft_s)
        if summary.tpot_s is not None and len(bucket.tpot_s) < _MAX_SAMPLES:
            bucket.tpot_s.append(summary.tpot_s)


def _shown(summary: Summary, now: float) -> dict[str, Any]:
    return {
        "id": summary.request_id,
        "ago_s": round(now - summary.ended_at, 2),
        "outcome": summary.ending,
        "failed": summary.is_failure,
        "prefill": summary.prefill_node,
        "decode": summary.decode_node,
        "attempts": summary.num_attempts,
        "prompt_tokens": summary.num_prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "output_tokens": summary.num_output_tokens,
        "drafted": summary.drafted,
        "accepted": summary.accepted,
        "kv_bytes": summary.kv_bytes,
        "transport": summary.transport,
        "ttft_s": summary.ttft_s,
        "tpot_s": summary.tpot_s,
        "total_s": round(summary.ended_at - summary.started_at, 6),
        "stages": [
            {"name": stage.name, "start_s": round(stage.start_s, 6), "end_s": round(stage.end_s, 6)}
            for stage in summary.stages
        ],
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None
