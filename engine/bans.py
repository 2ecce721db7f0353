"""Sequences of tokens that an answer must not contain: which tokens would complete one at a place.

Owns how much of the answer has to be remembered for it. Must never know scores or how a token is drawn.
"""

from collections.abc import Iterable, Sequence


class Bans:
    """Invariant: `after` says the same as if the whole answer had been kept.

    Only the answer counts: a sequence that began in the prompt may be completed.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], outputs: Sequence[int]) -> None:
        self._last_ids: dict[tuple[int, ...], list[int]] = {}
        for sequence in sequences:
            self._last_ids.setdefault(tuple(sequence[:-1]), []).append(sequence[-1])
        self._begin_lens = sorted({len(begin) for begin in self._last_ids})
        self._num_kept = max(self._begin_lens, default=0)
        self._recent: tuple[int, ...] = ()
        self.advance(outputs)

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were emitted."""
        if self._num_kept:
            self._recent = (*self._recent, *token_ids)[-self._num_kept :]

    def after(self, path: Sequence[int]) -> list[int]:
        """Tokens that must not follow the answer so far and then the tokens of `path`."""
        if not self._last_ids:
            return []
        context = (*self._recent, *path)
        banned: list[int] = []
        for length in self._begin_lens:
            if length <= len(context):
                banned += self._last_ids.get(context[len(context) - length :], ())
        return banned
