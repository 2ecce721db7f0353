"""What the round loop tells its caller of each step, and what it counts. Plain values."""

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ALL_FORBIDDEN
from engine.params import TokenLogprob
from engine.request import Request
from speculative.budgets.budget import BudgetState

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one step did for one request. `tokens` are new; the first `num_accepted` were drafted.

    prompt_logprobs: of the prompt's tokens from `first_scored` on, when they were asked for.
    finish_reason: set once, on the step after which the request no longer runs here.
    error: the request was dropped because its logits were unusable.
    """

    request: Request
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    first_scored: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str = ""

    @property
    def is_all_forbidden(self) -> bool:
        """The error is that grammar and bans left no token to draw."""
        return self.error == ALL_FORBIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    progress: tuple[Progress, ...] = ()
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()


@dataclass(slots=True)
class LoopCounters:
    """Totals since start, for metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    drafted_rounds: int = 0  # those with at least one draft
    constrained_rows: int = 0  # logits rows masked by a grammar
    stalled_rounds: int = 0  # rounds given up because their masks took too long
    preemptions: int = 0
    draft_limit: int = 0  # of the last round
    budget: BudgetState = field(default_factory=BudgetState)
    is_simulated: bool = False  # drafts stand whatever the target says
    accepted_at: list[int] = field(default_factory=list)  # [i]: rounds that accepted more than i drafts

    def count_round(self, *, num_drafted: int, num_accepted: int) -> None:
        self.rounds += 1
        self.drafted_rounds += num_drafted > 0
        self.drafted += num_drafted
        self.accepted += num_accepted
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def as_dict(self) -> dict[str, float]:
        counts = {
            "engine_steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "rounds": self.rounds,
            "drafted_rounds": self.drafted_rounds,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "constrained_rows": self.constrained_rows,
            "stalled_rounds": self.stalled_rounds,
            "preemptions": self.preemptions,
            "draft_limit": self.draft_limit,
            "draft_limit_switches": self.budget.num_switches,
            "draft_limit_probes": self.budget.num_probes,
            "draft_gain": self.budget.gain,
            "simulated_acceptance": self.is_simulated,
        }
        per_position = {f"accepted_at_{i}": count for i, count in enumerate(self.accepted_at)}
        return {name: float(count) for name, count in (counts | per_position).items()}
