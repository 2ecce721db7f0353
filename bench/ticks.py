"""Words that tell the time: how late a token arrives, whatever carried it.

A token sent at tick t is the word with index t modulo the number of words. Whoever reads it looks at the
same clock, which all processes of a machine share. Must never know what is measured with it.
"""

import time
from collections.abc import Callable, Mapping, Sequence

TICK_S = 1e-4


def tick() -> int:
    """Now, in ticks."""
    return time.monotonic_ns() // 100_000


class TickReader:
    """Reads how late words are. They must arrive within half a turn of `words`."""

    def __init__(self, words: Sequence[bytes], *, clock: Callable[[], int] = tick) -> None:
        self._clock = clock
        self._index: Mapping[bytes, int] = {word: index for index, word in enumerate(words)}
        self._num_words = len(words)

    def lateness_s(self, word: bytes) -> float | None:
        """Seconds since the word was sent, on average half a tick too many; None for no word of ours."""
        index = self._index.get(word)
        if index is None:
            return None
        return ((self._clock() - index) % self._num_words) * TICK_S
