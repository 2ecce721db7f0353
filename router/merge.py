"""Puts the tokens of one request in order, whoever sent them: index i is delivered exactly once.

Owns the output so far. Must never know nodes, attempts or time.
"""

from router.requests import Delta
from wire.work import Tokens


class MergeFault(Exception):
    """Reported tokens contradict what was delivered, or cannot be of this request."""


class TokenMerger:
    """`delivered[i]` is output token i, and never changes once it is there."""

    def __init__(self, *, max_tokens: int) -> None:
        self.delivered: list[int] = []
        self.duplicates = 0
        self._max_tokens = max_tokens
        self._early: dict[int, Tokens] = {}

    @property
    def has_gap(self) -> bool:
        """True while tokens wait for an index that has not come."""
        return bool(self._early)

    def restart(self) -> None:
        """Forget what the last attempt sent out of order; what was delivered stays."""
        self._early.clear()

    def add(self, tokens: Tokens) -> list[Delta]:
        """Take one report in; returns what may now be delivered, in order. Raises MergeFault."""
        end = tokens.first_index + len(tokens.ids)
        if not tokens.ids or tokens.first_index < 0 or end > self._max_tokens:
            raise MergeFault(f"tokens [{tokens.first_index}, {end}) of at most {self._max_tokens}")
        if tokens.logprobs is not None and len(tokens.logprobs) != len(tokens.ids):
            raise MergeFault(f"{len(tokens.logprobs)} logprobs for {len(tokens.ids)} tokens")
        if tokens.first_index > len(self.delivered):
            self._hold(tokens)
            return []
        ready = self._deliver(tokens)
        while self._early and (first := min(self._early)) <= len(self.delivered):
            ready += self._deliver(self._early.pop(first))
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
        before = tuple(self.delivered[tokens.first_index : tokens.first_index + len(tokens.ids)])
        if before != tokens.ids[: len(before)]:
            raise MergeFault(f"index {tokens.first_index}: {before} delivered, now {tokens.ids}")
        if before:
            self.duplicates += 1
        if known >= len(tokens.ids):
            return []
        self.delivered.extend(tokens.ids[known:])
        return [_tail(tokens, known)]


def _tail(tokens: Tokens, known: int) -> Delta:
    """What is new in a report whose first `known` tokens were delivered before."""
    logprobs = None if tokens.logprobs is None else tokens.logprobs[known:]
    return Delta(
        first_index=tokens.first_index + known,
        ids=tokens.ids[known:],
        logprobs=logprobs,
        drafted=tokens.drafted,
        accepted=max(0, tokens.accepted - known),
    )
