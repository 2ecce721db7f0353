"""Which pair of nodes takes a request: pure functions of what is known, named in one table.

Must never know links, registries or time. A policy sees only pairs that may be used, in a fixed
order, and chooses prefill and decode node together.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from wire.records import Load
from wire.work import Incarnation

EXPECTED_OUTPUT_TOKENS = 512
"""How long an answer is counted on to become at most, as decode nodes do by default (`reserve_tokens`)."""

_MOVED_TOKEN = 1 / 16
_BUSY_REQUEST = 32
"""Rough prices in prompt tokens; they settle ties between nodes more than they weigh against computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What a policy may know of a request."""

    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    cached: Mapping[Incarnation, int] = field(default_factory=dict)
    """Tokens of what is to be computed that nodes are believed to have; nodes that have none are left out."""

    def uncached_on(self, node: Incarnation) -> int:
        return max(0, self.num_prompt_tokens - self.cached.get(node, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """A node's last heartbeat, and what this router has sent it, and got back from it, since."""

    incarnation: Incarnation
    load: Load
    page_size: int
    sent_requests: int = 0
    sent_tokens: int = 0
    sent_pages: int = 0
    freed_pages: int = 0

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens + self.sent_tokens

    @property
    def busy_requests(self) -> int:
        return self.load.running + self.load.waiting + self.sent_requests

    def free_pages_after(self, facts: RequestFacts) -> int:
        """Pages left once everything known has its pages and this request too; may be negative."""
        free_pages = self.load.free_pages + self.freed_pages
        if self.load.total_pages:
            free_pages = min(free_pages, self.load.total_pages)
        return free_pages - self.sent_pages - pages_of(facts, self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A pair that may be used. `prefill` None: the decode node does the prompt itself."""

    prefill: NodeLoad | None
    decode: NodeLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """`turn` counts the decisions made before this one; `seed` makes random policies repeatable."""

    turn: int
    seed: int = 0


class Policy(Protocol):
    def __call__(self, facts: RequestFacts, pairs: Sequence[Pair], state: PolicyState, /) -> Pair:
        """One of `pairs`, which is not empty."""
        ...


def pages_of(facts: RequestFacts, page_size: int) -> int:
    """Pages a request is counted on to need; most answers end long before `max_tokens`."""
    return -(-(facts.num_prompt_tokens + min(facts.max_tokens, EXPECTED_OUTPUT_TOKENS)) // page_size)


def most_pages_of(facts: RequestFacts, page_size: int) -> int:
    """Pages a request needs when it runs to its end."""
    return -(-(facts.num_prompt_tokens + facts.max_tokens) // page_size)


def round_robin(_facts: RequestFacts, pairs: Sequence[Pair], state: PolicyState) -> Pair:
    """Prefill nodes in turn; each goes through its decode nodes, shifted so that both sides stay even."""
    groups = list(_by_prefill(pairs).values())
    lap, index = divmod(state.turn, len(groups))
    group = groups[index]
    return group[(lap + index) % len(group)]


def least_load(facts: RequestFacts, pairs: Sequence[Pair], _state: PolicyState) -> Pair:
    """Fewest prompt tokens before us on P; on D room for all of us, then fewest requests, then most pages."""
    return min(pairs, key=lambda pair: _cost(facts, pair))


def power_of_two(facts: RequestFacts, pairs: Sequence[Pair], state: PolicyState) -> Pair:
    """Two prefill nodes at random, then two decode nodes of the better one; the less loaded of each."""
    rng = random.Random(f"{state.seed}:{state.turn}")
    groups = list(_by_prefill(pairs).values())
    drawn = [rng.sample(group, min(2, len(group))) for group in rng.sample(groups, min(2, len(groups)))]
    group = min(drawn, key=lambda candidates: _prefill_cost(candidates[0]))
    return min(group, key=lambda pair: _cost(facts, pair))


def prefix(facts: RequestFacts, pairs: Sequence[Pair], state: PolicyState) -> Pair:
    """Least work until the first token, cached pages counted; on D few pages to move and few requests.

    Pairs that are equally good take turns, so that what nobody has yet spreads over all caches.
    """
    works = [_work(facts, pair) for pair in pairs]
    least = min(works)
    best = [pair for pair, work in zip(pairs, works, strict=True) if work == least]
    return best[state.turn % len(best)]


def _by_prefill(pairs: Sequence[Pair]) -> dict[Incarnation | None, list[Pair]]:
    groups: dict[Incarnation | None, list[Pair]] = {}
    for pair in pairs:
        key = None if pair.prefill is None else pair.prefill.incarnation
        groups.setdefault(key, []).append(pair)
    return groups


def _prefill_cost(pair: Pair) -> int:
    return 0 if pair.prefill is None else pair.prefill.queued_tokens


def _cost(facts: RequestFacts, pair: Pair) -> tuple[bool, int, int, int]:
    free_pages = pair.decode.free_pages_after(facts)
    return free_pages < 0, _prefill_cost(pair), pair.decode.busy_requests, -free_pages


def _work(facts: RequestFacts, pair: Pair) -> tuple[bool, float]:
    """In prompt tokens to compute. What is moved to D costs little, each request there a little."""
    computing = pair.decode if pair.prefill is None else pair.prefill
    moved = 0 if pair.prefill is None else facts.uncached_on(pair.decode.incarnation)
    work = (
        computing.queued_tokens
        + facts.uncached_on(computing.incarnation)
        + _MOVED_TOKEN * moved
        + _BUSY_REQUEST * pair.decode.busy_requests
    )
    return pair.decode.free_pages_after(facts) < 0, work


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "round_robin": round_robin,
        "least_load": least_load,
        "power_of_two": power_of_two,
        "prefix": prefix,
    }
)


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {name!r}")
    return POLICIES[name]
