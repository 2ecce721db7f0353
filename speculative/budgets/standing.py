"""How likely drafts are to stand, by how good a draft each was thought to be.

Owns one chance per rank, learned from every round whatever its limit, and how much each is worth by now.
Must never know costs, batch sizes or a clock.

A draft of rank r is what a limit of r buys over one of r - 1, in a chain and in a tree alike, so the tokens
a round emits at a limit are 1 and the chances of the ranks within it; and a round tells what would have
stood at every lower limit too.
"""

from collections.abc import Sequence

from speculative.budgets.budget import Verified

# Before anything is known, and as far as it may be hoped: the chance of the r-th draft is this, to the r.
_FIRST_CHANCE = 0.6
_HOPED_CHANCE = 0.8
# Weights are in verified requests. A chance weighs at most so many, or so many rounds, whichever is more.
_FIRST_WEIGHT = 2.0
_MOST_WEIGHT = 32.0
_MOST_ROUNDS = 4
# What is not seen counts for less with every round, down to the first weight: text changes.
_FADE = 0.98
# Hope weighs as much as so many requests seen.
_HOPE_WEIGHT = 4.0


class Standing:
    """Ranks count from 1; entry r - 1 of either list is rank r's."""

    def __init__(self, max_tokens: int) -> None:
        self._chances = [_FIRST_CHANCE**rank for rank in range(1, max_tokens + 1)]
        self._weights = [_FIRST_WEIGHT] * max_tokens

    def tokens(self, limit: int) -> float:
        """Tokens a request is likely to emit in a round at this limit."""
        return 1.0 + sum(self._chances[:limit])

    def hoped_tokens(self, limit: int) -> float:
        """The most of them that it is reasonable to hope for: little has been seen of it, or long ago."""
        total, hoped = 1.0, 1.0
        for chance, weight in zip(self._chances[:limit], self._weights, strict=False):
            doubt = _HOPE_WEIGHT / (_HOPE_WEIGHT + weight)
            hoped = chance + doubt * max(0.0, _HOPED_CHANCE * hoped - chance)
            total += hoped
        return total

    def observe(self, verified: Sequence[Verified]) -> None:
        num_tried = [0] * len(self._chances)
        num_stood = [0] * len(self._chances)
        for request in verified:
            for index in range(min(request.limit, len(num_tried))):
                num_tried[index] += 1
            for rank in request.ranks:
                num_stood[rank - 1] += 1
        for index, tried in enumerate(num_tried):
            if tried:
                self._learn(index, num_stood[index] / tried, tried)
            else:
                self._weights[index] = max(_FIRST_WEIGHT, _FADE * self._weights[index])

    def _learn(self, index: int, share: float, num_tried: int) -> None:
        total = self._weights[index] + num_tried
        self._chances[index] += num_tried / total * (share - self._chances[index])
        self._weights[index] = min(total, max(_MOST_WEIGHT, _MOST_ROUNDS * num_tried))
