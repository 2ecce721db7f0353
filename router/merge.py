"""Puts the tokens of one request in order, whoever sent them: index i is delivered exactly once.

Owns the output so far, and what the prompt's own tokens scored. Must never know nodes, attempts or time.
"""

from router.requests import Delta
from wire.work import PromptLogprobs, TokenLogprob, Tokens


class MergeFault(Exception):
    """Reported tokens contradict what was delivered, or cannot be of this request."""


class TokenMerger:
    """`delivered[i]` is output token i, and never changes once it is there.

    `num_scores`: how many prompt tokens were to be scored, None when they were not; the first delta has them.
    """

    def __init__(self, *, max_tokens: int, num_scores: int | None = None) -> None:
        self._num_scores = num_scores
        self._scores: list[TokenLogprob] = []
        self.delivered: list[int] = []
        self.duplicates = 0
        self._max_tokens = max_tokens
        self._early: dict[int, Tokens] = {}

    @property
    def has_gap(self) -> bool:
        """True while tokens wait for an index that has not come."""
        return bool(self._early)

    @property
    def wants_scores(self) -> bool:
        """True while log-probabilities of the prompt are missing."""
        return self._num_scores is not None and len(self._scores) < self._num_scores

    def score(self, scored: PromptLogprobs) -> None:
        """Take scores of prompt tokens in; an attempt begins anew and repeats what the last one told."""
        known = len(self._scores) + 1 - scored.first_index
        end = scored.first_index + len(scored.logprobs)
        if known < 0 or self._num_scores is None or end > self._num_scores + 1:
            raise MergeFault(f"prompt scores [{scored.first_index}, {end}), {len(self._scores)} are known")
        self._scores += scored.logprobs[known:]

    def restart(self) -> None:
        """Forget what the last attempt sent out of order; what was delivered stays."""
        self._early.clear()

    def add(self, tokens: Tokens) -> list[Delta]:
        """Take one report in; returns what may now be delivered, in order. Raises MergeFault."""
        first = tokens.first_index
        end = first + len(tokens.ids)
        if not tokens.ids or first < 0 or end > self._max_tokens:
            raise MergeFault(f"tokens [{first}, {end}) of at most {self._max_tokens}")
        if tokens.logprobs is not None and len(tokens.logprobs) != len(tokens.ids):
            raise MergeFault(f"{len(tokens.logprobs)} logprobs for {len(tokens.ids)} tokens")
        if first == 0 and self.wants_scores:
            raise MergeFault(
                f"{len(self._scores)} of {self._num_scores} prompt scores before the first token"
            )
        if first > len(self.delivered):
            self._hold(tokens)
            return []
        ready = self._deliver(tokens)
        while self._early and (held := min(self._early)) <= len(self.delivered):
            ready += self._deliver(self._early.pop(held))
        return ready

    def _hold(self, tokens: Tokens) -> None:
        held = self._early.get(tokens.first_index)
        if held is None:
            self._early[tokens.first_index] = tokens
            return
        shared = min(len(held.ids), len(tokens.ids))
        if held.ids[:shared] != tokens.ids[:shared]:
            raise MergeFault(f"index {tokens.first_index}: {held.ids} and {tokens.ids}")
        self.duplicates += 1
        if len(tokens.ids) > len(held.ids):
            self._early[tokens.first_index] = tokens

    def _deliver(self, tokens: Tokens) -> list[Delta]:
        known = len(self.delivered) - tokens.first_index
        if known:
            before = tuple(self.delivered[tokens.first_index : tokens.first_index + len(tokens.ids)])
            if before != tokens.ids[: len(before)]:
                raise MergeFault(f"index {tokens.first_index}: {before} delivered, now {tokens.ids}")
            self.duplicates += 1
            if known >= len(tokens.ids):
                return []
        has_scores = not self.delivered and self._num_scores is not None
        new = Delta(
            first_index=len(self.delivered),
            ids=tokens.ids[known:],
            logprobs=None if tokens.logprobs is None else tokens.logprobs[known:],
            drafted=tokens.drafted,
            accepted=max(0, tokens.accepted - known),
            prompt_logprobs=tuple(self._scores) if has_scores else None,
        )
        self.delivered.extend(new.ids)
        return [new]
