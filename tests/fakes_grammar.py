"""A grammar that is a list of token sequences, and records what is asked of it."""

from collections.abc import Sequence

import numpy as np

from engine.grammar import Words


class ListMatcher:
    """Follows any of `language`; the last token of each is a stop token."""

    def __init__(self, language: Sequence[Sequence[int]]) -> None:
        self._language = [tuple(one) for one in language]
        self.accepted: list[int] = []
        self.calls: list[str] = []

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted({one[-1] for one in self._language}))

    @property
    def is_over(self) -> bool:
        return tuple(self.accepted) in self._language

    def accept(self, token_id: int) -> bool:
        if token_id not in self._next():
            return False
        self.accepted.append(token_id)
        self.calls.append(f"acc{token_id}")
        return True

    def rollback(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]
        self.calls.append("rb" * count)

    def fill(self, words_NW: Words, row: int) -> None:
        words_NW[row] = packed(self._next(), num_words=words_NW.shape[1])
        self.calls.append("fill")

    def _next(self) -> set[int]:
        count = len(self.accepted)
        return {one[count] for one in self._language if list(one[:count]) == self.accepted and one[count:]}


def packed(token_ids: Sequence[int] | set[int], *, num_words: int) -> Words:
    words_W = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        words_W[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words_W.view(np.int32)


def unpacked(words_W: Words) -> set[int]:
    bits = np.unpackbits(words_W.view(np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())
