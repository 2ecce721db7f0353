"""Reads the JSON of tool calls while it grows, so that arguments stream as they are written.

Owns where an object, its name and its arguments begin and end. Must never know what surrounds it.
"""

import json

from router.text.parsers.parts import CallArguments, CallStart, Content, Part

_ARGUMENT_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class _Nesting:
    """Where in a JSON text the next character stands."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_string = False
        self._is_escaped = False

    def take(self, char: str) -> None:
        if self.is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.is_string = False
        elif char == '"':
            self.is_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class ValueReader:
    """One JSON object or array; gives its text out as it comes. The text must begin with its bracket."""

    def __init__(self) -> None:
        self._nesting = _Nesting()

    def push(self, text: str) -> tuple[str, str | None]:
        """The value's own text, and what follows it: None while the value goes on."""
        for end, char in enumerate(text, start=1):
            self._nesting.take(char)
            if self._nesting.depth <= 0 and not self._nesting.is_string:
                return text[:end], text[end:]
        return text, None


class CallReader:
    """One object such as {"name": "f", "arguments": {...}}, from its opening brace to its closing one.

    Arguments that come before the name wait for it. An object without a name is no call: its text comes
    back as content when it ends.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._nesting = _Nesting()
        self._raw = ""
        self._is_begun = False
        self._key: str | None = None
        self._token = ""
        self._is_streaming = False  # the value in hand is the arguments, given out as they come
        self.is_named = False
        self._waiting = ""
        self._has_arguments = False

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """Parts, and what follows the object: None while it goes on."""
        parts: list[Part] = []
        for end, char in enumerate(text, start=1):
            is_top = self._nesting.depth == 1 and not self._nesting.is_string
            self._nesting.take(char)
            if not is_top or char not in ",:}":
                self._grow(char, parts)
            elif char == ":" and self._key is None:
                self._key, self._token = self._decoded_string(), ""
            elif char != ":":
                self._end_value(parts)
            if self._nesting.depth <= 0 and not self._nesting.is_string:
                self._raw += text[:end]
                return parts + self._end(), text[end:]
        self._raw += text
        return parts, None

    def finish(self) -> list[Part]:
        """The text ended inside the object."""
        return [] if self.is_named else [Content(self._raw)]

    def _grow(self, char: str, parts: list[Part]) -> None:
        if not self._is_begun:
            self._is_begun = True  # the object's own brace
        elif self._is_streaming:
            self._stream(char, parts)
        else:
            self._token += char
            if self._key in _ARGUMENT_KEYS and self._token.lstrip(_BLANKS) == "{":
                self._is_streaming = True
                self._stream(char, parts)

    def _stream(self, char: str, parts: list[Part]) -> None:
        if char in _BLANKS and self._nesting.depth == 1 and not self._nesting.is_string:
            return  # behind the arguments' closing brace
        self._has_arguments = True
        self._argue(char, parts)

    def _argue(self, text: str, parts: list[Part]) -> None:
        if self.is_named:
            parts.append(CallArguments(self._index, text))
        else:
            self._waiting += text

    def _end_value(self, parts: list[Part]) -> None:
        key, token = self._key, self._token.strip(_BLANKS)
        if key == "name" and not self.is_named and (name := self._decoded_string()):
            self.is_named = True
            parts.append(CallStart(self._index, name))
            parts.append(CallArguments(self._index, self._waiting))
        elif key in _ARGUMENT_KEYS and not self._has_arguments and token not in ("", "null"):
            self._has_arguments = True
            self._argue(self._decoded_string() or token, parts)
        self._key, self._token, self._is_streaming = None, "", False

    def _end(self) -> list[Part]:
        if not self.is_named:
            return [Content(self._raw)]
        return [] if self._has_arguments else [CallArguments(self._index, "{}")]

    def _decoded_string(self) -> str:
        """The JSON string in hand, "" when it is none."""
        try:
            value = json.loads(self._token)
        except ValueError:
            return ""
        return value if isinstance(value, str) else ""
