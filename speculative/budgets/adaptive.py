"""The limit that emits most tokens per second, learned while serving.

Owns which limit is in force at which batch size, and when another one is tried. Must never know a request,
a proposer, or where its clock comes from.

A limit's worth is the tokens it is likely to bring (`standing`) over what its round costs (`costs`). Limits
below the one in force are judged without trying them, except for their costs; those above are probed, a
round at a time, and so is the lowest, to compare its cost. A probe that brings nothing makes the next one
wait twice as long, and all the time that probes lose is kept to a small share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from speculative.budgets.budget import BudgetState, Verified, check_slots
from speculative.budgets.costs import RoundCosts, range_of
from speculative.budgets.standing import Standing

# A limit takes over when it is worth this much more than the one in force.
_HYSTERESIS = 0.03
# Share of the time of other rounds that probes may lose, beyond this many rounds at the start.
_PROBE_SHARE = 0.01
_FREE_PROBES = 1.0
# Rounds between two probes of a kind.
_LEAST_WAIT = 2
_MOST_WAIT = 128
# Probes that lose nothing follow each other, but so many in a row must move the limit or wait.
_MOST_LUCKY = 4
# A round whose requests could use less than this share of its limit, being about to end, is not timed.
_LEAST_USED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """max_tokens: the most the algorithm drafts.

    slots: smallest batch size -> limits to choose from, ascending, higher ones than max_tokens meaning that;
    empty: at every size 0, 1, 2, 3, 4, 6, 8, 12 and so on.
    """

    max_tokens: int
    slots: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.slots:
            check_slots(self.slots)

    def candidates(self, num_requests: int) -> tuple[int, ...]:
        found = next(
            (limits for size, limits in sorted(self.slots.items(), reverse=True) if size <= num_requests),
            _spaced(self.max_tokens),
        )
        return tuple(sorted({min(limit, self.max_tokens) for limit in found}))


class AdaptiveBudget:
    """`start` a round, then `finish` it. `clock`: seconds, read at both."""

    def __init__(self, config: AdaptiveConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._standing = Standing(config.max_tokens)
        self._costs = RoundCosts()
        self._places: dict[tuple[int, tuple[int, ...]], _Place] = {}
        self._round = _Round(num_requests=0, limit=0)
        self._num_switches = 0
        self._num_probes = 0
        self._gain = 1.0

    @property
    def state(self) -> BudgetState:
        return BudgetState(num_switches=self._num_switches, num_probes=self._num_probes, gain=self._gain)

    def start(self, num_requests: int) -> int:
        candidates = self._config.candidates(num_requests)
        place = self._places.setdefault((range_of(num_requests), candidates), _Place(candidates))
        worths = {limit: self._worth(num_requests, limit) for limit in place.candidates}
        self._num_switches += place.choose(worths)
        if self._costs.has_measured(num_requests, (0, place.limit)):
            self._gain = worths[place.limit] * self._costs.cost(num_requests, 0)
        limit = self._probe(place, num_requests)
        self._num_probes += limit is not None
        self._round = _Round(
            num_requests=num_requests,
            limit=place.limit if limit is None else limit,
            place=place,
            worth=worths[place.limit],
            started=self._clock(),
        )
        return self._round.limit

    def finish(self, verified: Sequence[Verified], *, is_alone: bool) -> None:
        seconds = self._clock() - self._round.started
        this, place = self._round, self._round.place
        assert place is not None
        self._standing.observe(verified)
        used = sum(request.limit for request in verified)
        is_whole = len(verified) == this.num_requests and used >= _LEAST_USED * this.limit * len(verified)
        if is_alone and is_whole:
            self._costs.observe(
                this.num_requests, this.limit, seconds=seconds, is_probe=this.limit != place.limit
            )
        cost = self._costs.cost(this.num_requests, this.limit)
        if this.limit == place.limit:
            place.pass_round(cost)
            return
        num_tokens = 1.0 + sum(len(request.ranks) for request in verified) / len(verified)
        is_close = self._worth(this.num_requests, this.limit) > this.worth / (1.0 + _HYSTERESIS)
        place.pass_probe(this.limit, lost=cost - num_tokens / this.worth, is_close=is_close)

    def _worth(self, num_requests: int, limit: int) -> float:
        return self._standing.tokens(limit) / self._costs.cost(num_requests, limit)

    def _probe(self, place: "_Place", num_requests: int) -> int | None:
        """The other limit to try now, if any: the most promising above, or the lowest of all."""
        if place.may_probe_up:
            above = [limit for limit in place.candidates if limit > place.limit]
            return max(
                above,
                key=lambda limit: self._standing.hoped_tokens(limit) / self._costs.cost(num_requests, limit),
            )
        return place.candidates[0] if place.may_probe_down else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """The round in hand. worth: of the limit in force."""

    num_requests: int
    limit: int
    place: "_Place | None" = None
    worth: float = 1.0
    started: float = 0.0


class _Place:
    """One range of batch sizes. Invariant: `limit`, which is in force, is one of `candidates`."""

    def __init__(self, candidates: tuple[int, ...]) -> None:
        self.candidates = candidates
        self.limit = candidates[0]
        self._is_chosen = False
        self._debt = -_FREE_PROBES  # time lost by probes and not yet paid for, in units of cost
        self._up = _Waiting()
        self._down = _Waiting()

    @property
    def may_probe_up(self) -> bool:
        return self._up.is_over and self._debt <= 0 and self.limit != self.candidates[-1]

    @property
    def may_probe_down(self) -> bool:
        return self._down.is_over and self._debt <= 0 and self.limit != self.candidates[0]

    def choose(self, worths: Mapping[int, float]) -> bool:
        """Whether the limit moved to another one."""
        best = max(worths, key=lambda limit: worths[limit])
        margin = 0.0 if best == self.candidates[0] else _HYSTERESIS
        if self._is_chosen and worths[best] <= worths[self.limit] * (1.0 + margin):
            return False
        has_moved = self._is_chosen and best != self.limit
        self.limit, self._is_chosen = best, True
        if has_moved:
            self._up, self._down = _Waiting(), _Waiting()
        return has_moved

    def pass_round(self, cost: float) -> None:
        self._debt = max(self._debt - _PROBE_SHARE * cost, min(self._debt, 0.0))
        self._up.pass_round()
        self._down.pass_round()

    def pass_probe(self, limit: int, *, lost: float, is_close: bool) -> None:
        """A probe that lost nothing is repeated at once: it may have been luck."""
        self._debt += max(0.0, lost)
        waiting = self._up if limit > self.limit else self._down
        waiting.begin(is_lucky=lost <= 0, is_close=is_close)


class _Waiting:
    """Rounds until the next probe of a kind."""

    def __init__(self) -> None:
        self._wait = self._left = _LEAST_WAIT
        self._num_lucky = 0  # probes in a row that lost nothing

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def pass_round(self) -> None:
        self._left -= 1

    def begin(self, *, is_lucky: bool, is_close: bool) -> None:
        self._num_lucky = self._num_lucky + 1 if is_lucky else 0
        if is_lucky and self._num_lucky < _MOST_LUCKY:
            self._left = 0
            return
        self._num_lucky = 0
        if not is_close:
            self._wait = min(2 * self._wait, _MOST_WAIT)
        self._left = self._wait


def _spaced(max_tokens: int) -> list[int]:
    """0, then steps that double: close together where a token more matters, few where it does not."""
    found, step = [0], 1
    while found[-1] < max_tokens:
        found.append(min(found[-1] + step, max_tokens))
        step = max(1, 2 ** (found[-1].bit_length() - 2))
    return found
