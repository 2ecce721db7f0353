"""Drafts by looking up how the request's own text went on before.

Owns one index per request over its prompt and its outputs, and how far the index has been right lately.
Must never share tokens between requests, nor need anything of the prefill node. Deterministic: a
proposal is a function of the request's tokens and the limits it was given.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engine.batch import ForwardOutput
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed

# Places looked at for one lookup, the most recent first: bounds the cost on text that repeats a lot.
_MAX_CANDIDATES = 16
# How far back a match is measured, for ranking only.
_MAX_MATCH_LEN = 32
# A drafted token costs about this much of a round; one that is less likely to stand is not worth it.
_ROW_COST = 0.1
# Hit rates start here, and move by this share of the difference to each new observation.
_FIRST_HIT_RATE = 0.5
_HIT_RATE_STEP = 0.1
# Matches at least this long share one hit rate; shorter ones have one per length.
_LONGEST_RATED = 8
# Continuations after the best may add so many tokens each: they insure its first tokens.
_SIDE_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """num_draft_tokens: most tokens of a proposal. branches: most continuations that are merged into one.

    A place in the text counts as a match when at least `min_ngram` tokens before it equal the last ones;
    `max_ngram` is the longest run looked up directly, so cost and memory grow with their difference.
    """

    num_draft_tokens: int = 8
    min_ngram: int = 2
    max_ngram: int = 4
    branches: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 256:
                raise ValueError(f"{name} must be a whole number in [1, 256], got {value!r}")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram must be at most max_ngram {self.max_ngram}, got {self.min_ngram}")


@dataclass(frozen=True, slots=True)
class Match:
    """The text before `start` equals the end of the text over `length` tokens (capped)."""

    length: int
    start: int


class NgramIndex:
    """Where each n-gram of one growing text occurred. Cost per appended token is O(max_ngram - min_ngram)."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self._orders = tuple(range(max_ngram, min_ngram - 1, -1))
        # Per order: n-gram -> the place after its last occurrence, and for each place the one before it
        # of the same n-gram (-1: none). The n-gram that ends the text is not in yet: nothing follows it.
        self._latest: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in self._orders)
        self._earlier: tuple[list[int], ...] = tuple([] for _ in self._orders)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text."""
        old_len = len(self.tokens)
        self.tokens.extend(token_ids)
        tokens, num_tokens = self.tokens, len(self.tokens)
        for order, latest, earlier in zip(self._orders, self._latest, self._earlier, strict=True):
            for place in range(old_len, num_tokens):
                if place < order:
                    earlier.append(-1)
                    continue
                ngram = tuple(tokens[place - order : place])
                earlier.append(latest.get(ngram, -1))
                latest[ngram] = place

    def matches(self) -> list[Match]:
        """Places that continue the end of the text: longest match first, then the most recent."""
        found: dict[int, Match] = {}
        for order, latest, earlier in zip(self._orders, self._latest, self._earlier, strict=True):
            if len(self.tokens) < order:
                continue
            place = latest.get(tuple(self.tokens[-order:]), -1)
            while place >= 0 and len(found) < _MAX_CANDIDATES:
                if place not in found:
                    found[place] = Match(self._match_len(place, order), place)
                place = earlier[place]
        return sorted(found.values(), key=lambda match: (-match.length, -match.start))

    def _match_len(self, place: int, known: int) -> int:
        tokens = self.tokens
        length, longest = known, min(place, _MAX_MATCH_LEN)
        while length < longest and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


class HitRates:
    """How often the next token was the one the best match predicted, per length of the match.

    Every round counts, also one that drafted nothing: so drafting stops where it does not pay, and
    starts again as soon as the text has become predictable.
    """

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def observe(self, match_len: int, predicted: Sequence[int], actual: Sequence[int]) -> None:
        """`actual` tokens came where `predicted` were expected; after the first miss nothing is learnt."""
        length = min(match_len, _LONGEST_RATED)
        for expected, token_id in zip(predicted, actual, strict=False):
            rate = self._rates.get(length, _FIRST_HIT_RATE)
            self._rates[length] = rate + _HIT_RATE_STEP * ((expected == token_id) - rate)
            if expected != token_id:
                break

    def worthwhile(self, match_len: int, limit: int) -> int:
        """How many tokens of such a match to draft: while each is likelier to stand than a row costs."""
        rate = self._rates.get(min(match_len, _LONGEST_RATED), _FIRST_HIT_RATE)
        num_tokens, chance = 0, rate
        while num_tokens < limit and chance >= _ROW_COST:
            num_tokens += 1
            chance *= rate
        return num_tokens


class _Branches:
    """Continuations merged into one tree: common beginnings once, siblings distinct."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        return self._limit - len(self._token_ids)

    def add(self, continuation: Sequence[int]) -> bool:
        """Merge one in, as far as the limit allows; whether it added a node."""
        old_room, node = self.room, 0
        for token_id in continuation:
            child = self._children.get((node, token_id))
            if child is None:
                if not self.room:
                    break
                self._token_ids.append(token_id)
                self._parents.append(node)
                child = self._children[node, token_id] = len(self._token_ids)
            node = child
        return self.room < old_room

    def proposal(self) -> Proposal:
        return Proposal(token_ids=tuple(self._token_ids), parents=tuple(self._parents))


class _Drafter:
    """One request: its index, its hit rates, and the prediction that its next tokens will judge."""

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._index = NgramIndex(config.min_ngram, config.max_ngram)
        self._hit_rates = HitRates()
        self._predicted: tuple[Match, list[int]] | None = None

    def draft(self, tokens: Sequence[int], limit: int) -> Proposal:
        fresh = tokens[len(self._index.tokens) :]
        if self._predicted is not None:
            match, predicted = self._predicted
            self._hit_rates.observe(match.length, predicted, fresh)
        self._index.extend(fresh)
        matches = self._index.matches()
        self._predicted = (matches[0], self._after(matches[0])) if matches else None
        return self._merged(matches, limit)

    def _after(self, match: Match) -> list[int]:
        return self._index.tokens[match.start : match.start + self._config.num_draft_tokens]

    def _merged(self, matches: Sequence[Match], limit: int) -> Proposal:
        branches, num_branches = _Branches(limit), 0
        for match in matches:
            if num_branches == self._config.branches or not branches.room:
                break
            num_tokens = self._hit_rates.worthwhile(match.length, limit)
            if num_branches:
                num_tokens = min(num_tokens, _SIDE_TOKENS)
            num_branches += branches.add(self._after(match)[:num_tokens])
        return branches.proposal()


class NgramProposer:
    """Invariant: one drafter per request admitted and not yet forgotten."""

    def __init__(self, config: NgramConfig) -> None:
        self.needs = DraftNeeds(max_draft_tokens=config.num_draft_tokens)
        self._config = config
        self._drafters: dict[Request, _Drafter] = {}

    def bind(self, model: Model, pool: PagePool) -> None:
        pass

    def admit(self, request: Request, seed: Seed | None) -> None:  # noqa: ARG002 - part of the seam
        drafter = _Drafter(self._config)
        drafter.draft(request.tokens, 0)  # indexes the prompt now, not in the first round
        self._drafters[request] = drafter

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [
            self._drafters[request].draft(request.tokens, min(limit, self._config.num_draft_tokens))
            for request, limit in zip(requests, limits, strict=True)
        ]

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        # Nothing to keep: `propose` reads what a request has emitted from its tokens.
        pass

    def seed(self, request: Request) -> Seed:  # noqa: ARG002 - part of the seam
        return Seed()

    def forget(self, request: Request) -> None:
        self._drafters.pop(request, None)  # a prefill node forgets requests it never admitted
