"""How many tokens are worth drafting, by the rule of an average of how many drafts have stood lately.

Owns one limit per range of batch sizes, each with its own average, and when it moves. Must never know a
request, a proposer or a clock: it counts batches. Drafts are counted as in a chain; in a tree the limit
counts nodes while no more than its depth can stand, so trees end up with fewer nodes than pays. It knows
nothing of what a draft costs: `speculative.budgets.adaptive` does.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from speculative.budgets.budget import BudgetState, Verified, check_slots

# Share of the difference by which the average moves to each batch's mean.
_EMA_STEP = 0.2
# A slot's first batches are only averaged; from then on it decides once in so many batches.
_WARM_UP_BATCHES = 10
_INTERVAL_BATCHES = 5

DEFAULT_SLOTS: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountConfig:
    """slots: smallest batch size -> limits to choose from, ascending; 0 is plain decoding.

    start: the limit to begin with, or the next lower candidate. max_tokens: higher candidates mean this.
    Hystereses shift the averages at which the limit goes down and up.
    """

    start: int
    max_tokens: int
    slots: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: DEFAULT_SLOTS)
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0

    def __post_init__(self) -> None:
        check_slots(self.slots)


class _Slot:
    """Invariant: `index` is that of the limit in force; `ema` averages what stood while any were drafted."""

    def __init__(self, config: CountConfig, candidates: Sequence[int]) -> None:
        self._config = config
        self._candidates = sorted({min(limit, config.max_tokens) for limit in candidates})
        self._index = max(0, bisect_right(self._candidates, config.start) - 1)
        self._num_batches = 0
        self.ema = max(0.0, self.limit - 1.0)

    @property
    def limit(self) -> int:
        return self._candidates[self._index]

    def observe(self, mean_accepted: float) -> bool:
        """Whether the limit moved."""
        if self.limit:
            self.ema += _EMA_STEP * (mean_accepted - self.ema)
        self._num_batches += 1
        num_rated = self._num_batches - _WARM_UP_BATCHES
        if num_rated <= 0 or num_rated % _INTERVAL_BATCHES:
            return False
        old, self._index = self._index, self._next()
        return old != self._index

    def _next(self) -> int:
        index, last = self._index, len(self._candidates) - 1
        while index > 0 and self.ema <= self._down_at(self._candidates[index - 1]):
            index -= 1
        if index < self._index:
            return index
        if self.limit == 0:
            return min(1, last)  # nothing is learned without drafting, so try again
        while index < last and self.ema > self._candidates[index] - 0.5 + self._config.up_hysteresis:
            index += 1
        return index

    def _down_at(self, lower: int) -> float:
        return (lower - 0.5 if lower else 0.5) + self._config.down_hysteresis


class CountBudget:
    """One limit for the whole batch, by its size. `start` a round, then `finish` it."""

    def __init__(self, config: CountConfig) -> None:
        self._slots = {
            size: _Slot(config, candidates) for size, candidates in sorted(config.slots.items(), reverse=True)
        }
        self._slot = self._slots[1]
        self._num_switches = 0

    @property
    def state(self) -> BudgetState:
        return BudgetState(num_switches=self._num_switches)

    @property
    def ema(self) -> float:
        """Accepted drafts per request lately, at the batch size of the round started last."""
        return self._slot.ema

    def start(self, num_requests: int) -> int:
        """The most tokens each of so many requests may draft in this round."""
        self._slot = next(slot for size, slot in self._slots.items() if size <= num_requests)
        return self._slot.limit

    def finish(self, verified: Sequence[Verified], *, is_alone: bool) -> None:  # noqa: ARG002 - part of the seam
        num_stood = sum(len(request.ranks) for request in verified)
        self._num_switches += self._slot.observe(num_stood / len(verified))
