"""The text of one answer as its tokens arrive: detokenising and stop strings together.

Owns which tokens belong to the answer. Must never know where tokens come from or how they are sent on.
"""

from collections.abc import Container, Sequence

import msgspec

from router.text.detokenize import Detokenizer
from router.text.stops import StopMatcher


class Piece(msgspec.Struct, frozen=True, gc=False):
    """New text, and how many of the pushed tokens belong to the answer."""

    text: str
    num_tokens: int


class TextStream:
    """Invariant: after a stop string or a stop token nothing more comes out, whatever is pushed.

    The tokens of an answer end with the one that completed the stop string, or with the stop token,
    whose text, like the stop string's, is shown only if `shows_stop`. Stop strings are not looked for in the
    text of the first `min_tokens` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        shows_stop: bool = False,
        stop_token_ids: Container[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, shows_stop=shows_stop)
        self._shows_stop = shows_stop
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._is_over = False
        self.num_tokens = 0

    @property
    def is_stopped_by_text(self) -> bool:
        return self._matcher.is_stopped

    def push(self, ids: Sequence[int]) -> Piece:
        """Take tokens in. Text may lag behind them."""
        texts: list[str] = []
        before = self.num_tokens
        for token_id in ids:
            if self._is_over:
                break
            self.num_tokens += 1
            texts.append(self._push_one(token_id))
        return Piece("".join(texts), self.num_tokens - before)

    def finish(self) -> str:
        """Text still held back at the end of the generation; a stop string may be found in it."""
        if self.is_stopped_by_text:
            return ""
        rest = self._detokenizer.finish()
        text = self._search(rest) if rest else ""
        self._is_over = True
        return text if self.is_stopped_by_text else text + self._matcher.finish()

    def _push_one(self, token_id: int) -> str:
        if token_id in self._stop_token_ids and self.num_tokens > self._min_tokens:
            self._is_over = True
            if not self._shows_stop:
                return ""
        text = self._detokenizer.push(token_id)
        if not self._matcher.has_stops:
            return text
        shown = self._search(text) if text else ""
        if not self.is_stopped_by_text and self._stops_if_it_ended_here():
            shown += self._search(self._detokenizer.finish())
        self._is_over |= self.is_stopped_by_text
        return shown

    def _stops_if_it_ended_here(self) -> bool:
        """A stop such as a newline may be complete in bytes the detokeniser still holds."""
        return self.num_tokens > self._min_tokens and self._matcher.would_stop(self._detokenizer.tentative())

    def _search(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens:
            return self._matcher.skip(text)
        return self._matcher.push(text)
