"""The parts of one answer: parsed, neighbours joined, calls beyond the limit left out.

Every front end reads answers through it. Must never know how parts are shown or how a model writes them.
"""

from collections.abc import Callable, Sequence

from router.text.parsers.parts import CallArguments, CallStart, Parser, Part, merged


class AnswerParts:
    """`max_calls` None: as many as the model makes. `is_free`: the model could have chosen another tool, or
    none. `new_call_id` makes the id that a call is known by."""

    def __init__(
        self,
        parser: Parser,
        *,
        new_call_id: Callable[[], str],
        max_calls: int | None = None,
        is_free: bool = True,
    ) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self.new_call_id = new_call_id
        self.is_free = is_free

    def push(self, text: str) -> list[Part]:
        """Parts that are new, none when everything is held back."""
        return self._allowed(self._parser.push(text))

    def finish(self) -> list[Part]:
        """What was held back, now that nothing follows."""
        return self._allowed(self._parser.finish())

    def _allowed(self, parts: Sequence[Part]) -> list[Part]:
        shown = merged(parts)
        if self._max_calls is None:
            return shown
        limit = self._max_calls
        return [p for p in shown if not isinstance(p, CallStart | CallArguments) or p.index < limit]
