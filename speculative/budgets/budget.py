"""The seam between the round loop and what decides how many tokens a round may draft.

Owns no decision but the simplest. Must never know a request or an algorithm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Names of the settings that say what decides.
BUDGET_OPTIONS = frozenset({"budget", "budget_slots"})


@dataclass(frozen=True, slots=True)
class Verified:
    """One request of a round. limit: the most tokens it might draft, which may be less than the round's.

    ranks: of the drafts that stand, in path order; 1 is the draft that a limit of 1 would have been spent
    on, and so on (see `Proposal.ranks`). In a chain that is 1, 2, 3, ….
    """

    limit: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """For metrics. gain: emitted tokens per second over plain decoding's, as estimated; 1 while unknown.

    num_switches: how often the limit moved; probes, single rounds at another limit, are counted apart.
    """

    num_switches: int = 0
    num_probes: int = 0
    gain: float = 1.0


class DraftBudget(Protocol):
    """The most tokens a request may draft, decided anew for every round."""

    @property
    def state(self) -> BudgetState: ...

    def start(self, num_requests: int) -> int:
        """The limit of the round that begins, for each of its requests (at least one)."""
        ...

    def finish(self, verified: Sequence[Verified], *, is_alone: bool) -> None:
        """The round started last is over. is_alone: nothing but these requests was computed in it."""
        ...


def check_slots(slots: Mapping[int, Sequence[int]]) -> None:
    """Raises ValueError unless it is, from batch size 1 on, smallest size -> ascending limits."""
    if min(slots, default=0) != 1:
        raise ValueError(f"budget_slots must begin with batch size 1, got {dict(slots)}")
    for size, limits in slots.items():
        if not limits or list(limits) != sorted(set(limits)) or limits[0] < 0:
            raise ValueError(
                f"budget_slots must give batch size {size} ascending limits of at least 0, got {limits}"
            )


class FixedBudget:
    """Always the same limit; the proposer has its own besides."""

    state = BudgetState()

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def start(self, num_requests: int) -> int:  # noqa: ARG002 - part of the seam
        return self._limit

    def finish(self, verified: Sequence[Verified], *, is_alone: bool) -> None:
        pass
