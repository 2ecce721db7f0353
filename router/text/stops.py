"""Searches a growing text for stop strings. Owns the text that may still turn out to be part of one."""

from collections.abc import Sequence

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class StopMatcher:
    """Gives text out as soon as it cannot belong to a stop string, and cuts at the first stop.

    The stop that is complete first wins; of those that end together, the one that began first. So the
    answer does not depend on how the text was split. Invariant: `_held` is the longest end of the text
    that begins some stop string. Search: Knuth, Morris, Pratt (1977), one automaton for each stop.
    `shows_stop`: the cut is behind the stop, not before it.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in stops)
        self._matched = [0] * len(stops)
        self._held = ""
        self._shows_stop = shows_stop
        self.has_stops = bool(stops)
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Text to give out, up to the stop string when `is_stopped` is true afterwards."""
        if not self._stops:
            return text
        assert not self.is_stopped, "nothing follows a stop string"
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            if (length := self._advance(char)) > 0:
                self.is_stopped = True
                self._held = ""
                return pending[: end if self._shows_stop else end - length]
        num_held = max(self._matched)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def would_stop(self, text: str) -> bool:
        """Whether a stop string would be complete if `text` came next; changes nothing."""
        saved = list(self._matched)
        found = any(self._advance(char) > 0 for char in text)
        self._matched = saved
        return found

    def skip(self, text: str) -> str:
        """Gives out text in which no stop may be found; the search starts afresh behind it."""
        released, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return released + text

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        released, self._held = self._held, ""
        return released

    def _advance(self, char: str) -> int:
        """Length of the longest stop that this character completes, 0 for none."""
        longest = 0
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and (matched == len(stop) or stop[matched] != char):
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper border."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return tuple(borders)
