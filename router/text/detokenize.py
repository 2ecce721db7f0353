"""Token ids to text, one token at a time.

Owns when a piece of text is definite: the joined pieces equal the decoding of all ids at once, so
nothing is given out that a later token could still change. Must never know stops or requests.
"""

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Decodes one token stream; special tokens have no text."""

    def push(self, token_id: int) -> str:
        """Text that is definite now that this token is known."""
        ...

    def tentative(self) -> str:
        """Text of the tokens still held, were the stream to end here; "" unless they are whole characters."""
        ...

    def finish(self) -> str:
        """The rest. U+FFFD appears only where the stream ended inside a character."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: every token is a run of bytes, and text is their UTF-8.

    Invariant: holds back less than one character.
    """

    def __init__(self, token_bytes: Sequence[bytes], special_ids: Container[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._held = b""

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids or token_id >= len(self._token_bytes):
            return ""
        data = self._held + self._token_bytes[token_id]
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        return text

    def tentative(self) -> str:
        return ""

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class WindowDetokenizer:
    """For any other vocabulary: decodes the new tokens behind the ones before them, and takes the difference.

    The tokens before give the context in which a leading space is kept. A run of byte tokens (`<0x0A>`)
    is held until it ends: byte-fallback decoders judge a run as a whole, so one more byte may change it all.
    Invariant: `_base` is the text of `_window`, and of nothing that `_held` could change.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        known: Container[int],
        special_ids: Container[int],
        byte_ids: Container[int],
        context: Sequence[int],
    ) -> None:
        self._decode = decode
        self._known = known
        self._special_ids = special_ids
        self._byte_ids = byte_ids
        self._window = list(context)
        self._base = decode(self._window)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids or token_id not in self._known:
            return ""
        self._held.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._new_text()
        return "" if text.endswith("\ufffd") else self._release(text)

    def tentative(self) -> str:
        text = self._new_text() if self._held else ""
        return "" if "\ufffd" in text else text

    def finish(self) -> str:
        return self._release(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        return self._decode(self._window + self._held)[len(self._base) :]

    def _release(self, text: str) -> str:
        self._window, self._held = self._held, []
        self._base = self._decode(self._window)
        return text
