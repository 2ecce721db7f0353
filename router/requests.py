"""What the front ends and the dispatcher say to each other: a request in token ids, and its answer.

Plain values. Must never know text, HTTP, gRPC or which node does what.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from wire.tally import Tally
from wire.work import GrammarSpec, SamplingParams, TokenLogprob

__all__ = [
    "Constraint",
    "Delta",
    "GenerateRequest",
    "Outcome",
    "SamplingParams",
    "Stage",
    "Summary",
    "Take",
    "Timings",
    "TokenLogprob",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form an answer must have, and the field that the user asked for it in. `is_for_words`: calls of
    tools need not have it."""

    spec: GrammarSpec
    field: str
    is_for_words: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation. Bad values raise ValueError.

    `model` "" takes whatever model the cluster serves. `label` is the client's own id, for logs only.
    `tenant`: whom it is charged to where requests wait; "" is a tenant like others.
    `deadline_s` counts from the first item asked of the dispatcher; None takes the configured one,
    and none is longer.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    label: str = ""
    priority: int = 0
    cache_salt: str = ""
    constraint: Constraint | None = None
    deadline_s: float | None = None
    trace_context: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt_ids must hold at least one token id, got ()")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be positive, got {self.deadline_s!r}")


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one request: output indices [first_index, first_index + len(ids)), never empty.

    Deltas arrive in index order without gap or repeat. The first `accepted` ids were drafts, out of
    `drafted` proposed. `logprobs` is as long as `ids`, or None when none were asked for. The first delta
    has `prompt_logprobs` where they were asked for, one for each prompt token but the first.
    """

    first_index: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    drafted: int = 0
    accepted: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


Take = Callable[[Delta], bool]
"""Called with every delta as soon as it is there; must not wait. False: nothing more is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds. `ttft_s` and `total_s` were measured here, the others by the nodes (0 when not told);
    `queue_s` is the waits here and on the node together.
    `join_s`: from the dispatch until the request ran on its decode node; `decode_s`: from then on.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    join_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The last item of every generation that succeeded. `reason` is "stop" or "length".

    `prefill_node` and `decode_node` are addresses of the last attempt; `prefill_node` is "" when the
    decode node did the prompt itself. `attempts` counts dispatches, 1 when nothing went wrong.
    """

    reason: str
    stop_token_id: int | None
    cached_tokens: int
    num_output_tokens: int
    num_steps: int
    drafted: int
    accepted: int
    kv_bytes: int
    transport: str
    timings: Timings
    prefill_node: str
    decode_node: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Part of a request's time, in seconds since its arrival. Stages may overlap."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is remembered of a request that is over. Times are the event loop's; no text, no token ids.

    `ending`: its finish reason, an error code, or "closed" when the consumer left. `acceptance[k]`: rounds
    with drafts of which k stood. `gaps`: seconds between deliveries.
    """

    request_id: str
    ending: str
    started_at: float
    ended_at: float
    ttft_s: float | None
    tpot_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_attempts: int
    cached_tokens: int
    drafted: int
    accepted: int
    acceptance: Mapping[int, int]
    gaps: Tally
    kv_bytes: int
    transport: str
    prefill_node: str
    decode_node: str
    stages: tuple[Stage, ...]

    @property
    def is_failure(self) -> bool:
        return self.ending not in ("stop", "length", "closed")
