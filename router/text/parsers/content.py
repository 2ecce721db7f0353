"""Content next to blocks of other kinds. Owns the blanks between them, which are layout and not words."""

from router.text.parsers.parts import Content, Part

_BLANKS = " \t\r\n"


class ContentGate:
    """Lets content through; blanks at its edges towards a block are dropped, all others are kept."""

    def __init__(self) -> None:
        self._held = ""
        self._is_after_block = False

    def push(self, text: str) -> list[Part]:
        """Blanks wait for what follows them."""
        if self._is_after_block:
            text = text.lstrip(_BLANKS)
        if not text:
            return []
        self._is_after_block = False
        text = self._held + text
        shown = text.rstrip(_BLANKS)
        self._held = text[len(shown) :]
        return [Content(shown)] if shown else []

    def block(self) -> None:
        """A block begins or ends here."""
        self._held = ""
        self._is_after_block = True

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        return [Content(held)] if held else []
