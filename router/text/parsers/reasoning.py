"""Reasoning between two markers, in front of the answer. Owns the markers' search over split texts."""

from router.text.parsers.content import ContentGate
from router.text.parsers.parts import Content, Parser, Part, Reasoning, held_length


class ReasoningParser:
    """`is_open`: the prompt already opened the reasoning, so the text begins inside it.

    Reasoning is taken once, in front: a marker inside the answer is text. What follows goes to `then`.
    """

    def __init__(self, *, opening: str, closing: str, is_open: bool, then: Parser) -> None:
        self._opening = opening
        self._closing = closing
        self._is_open = is_open
        self._then = then
        self._buffer = ""
        self._state = "before"
        self._is_answer_begun = True
        self._gate = ContentGate()

    def push(self, text: str) -> list[Part]:
        if self._state == "after":
            return self._answer(text)
        self._buffer += text
        parts: list[Part] = []
        if self._state == "before":
            parts += self._before()
        if self._state == "inside":
            parts += self._inside()
        return parts

    def finish(self) -> list[Part]:
        held, self._buffer = self._buffer, ""
        if self._state == "inside":
            return [*self._thought(held), *_as_reasoning(self._gate.finish())]
        return [*self._answer(held), *self._then.finish()]

    def _before(self) -> list[Part]:
        """Only blanks may stand before the opening marker."""
        text = self._buffer.lstrip()
        if text.startswith(self._opening):
            self._enter(text[len(self._opening) :])
        elif not self._opening.startswith(text):  # also of an empty text
            if self._is_open:
                self._enter(self._buffer)
            else:
                self._state = "after"
                held, self._buffer = self._buffer, ""
                return self._answer(held)
        return []

    def _enter(self, rest: str) -> None:
        self._state, self._buffer = "inside", rest
        self._gate.block()

    def _inside(self) -> list[Part]:
        thought, marker, rest = self._buffer.partition(self._closing)
        if not marker:
            keep = held_length(thought, self._closing)
            self._buffer = thought[len(thought) - keep :]
            return self._thought(thought[: len(thought) - keep])
        parts = self._thought(thought)
        self._state, self._buffer = "after", ""
        self._is_answer_begun = False
        return parts + self._answer(rest)

    def _thought(self, text: str) -> list[Part]:
        return _as_reasoning(self._gate.push(text))

    def _answer(self, text: str) -> list[Part]:
        """Blanks between reasoning and answer are layout."""
        if not self._is_answer_begun:
            text = text.lstrip()
            self._is_answer_begun = bool(text)
        return self._then.push(text) if text else []


def _as_reasoning(parts: list[Part]) -> list[Part]:
    return [Reasoning(part.text) if isinstance(part, Content) else part for part in parts]
