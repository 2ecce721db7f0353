"""The formats in which models write tool calls. Owns their markers; names are those users know from vLLM."""

from router.text.parsers.content import ContentGate
from router.text.parsers.json_call import CallReader, ValueReader
from router.text.parsers.parts import CallArguments, CallStart, Content, Part, held_length

_BLANKS = " \t\r\n"


class PlainText:
    """No calls: everything is content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)]

    def finish(self) -> list[Part]:
        return []


class _Calls:
    """Objects one after the other, with separators between them that mean nothing."""

    def __init__(self, *, separators: str) -> None:
        self._separators = separators
        self._reader: CallReader | None = None
        self.num_calls = 0

    def push(self, text: str) -> tuple[list[Part], str]:
        """Parts, and what is left when something else than an object comes: "" while all was taken."""
        parts: list[Part] = []
        while text:
            if self._reader is None:
                text = text.lstrip(self._separators)
                if not text.startswith("{"):
                    break
                self._reader = CallReader(self.num_calls)
            more, rest = self._reader.push(text)
            parts += more
            if rest is not None:
                self._end(self._reader)
            text = rest or ""
        return parts, text

    def finish(self) -> list[Part]:
        if self._reader is None:
            return []
        parts = self._reader.finish()
        self._end(self._reader)
        return parts

    def _end(self, reader: CallReader) -> None:
        self.num_calls += reader.is_named
        self._reader = None


class HermesCalls:
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them, among content.

    A marker that no object follows is content; so is an object that is no call.
    """

    OPENING = "<tool_call>"
    CLOSING = "</tool_call>"

    def __init__(self) -> None:
        self._buffer = ""
        self._is_inside = False
        self._calls = _Calls(separators=_BLANKS)
        self._gate = ContentGate()

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._buffer:
            size = len(self._buffer)
            parts += self._inside() if self._is_inside else self._outside()
            if len(self._buffer) == size:
                break
        return parts

    def finish(self) -> list[Part]:
        held, self._buffer = self._buffer, ""
        return [*self._calls.finish(), *self._gate.push(held), *self._gate.finish()]

    def _outside(self) -> list[Part]:
        content, marker, rest = self._buffer.partition(self.OPENING)
        if not marker:
            keep = held_length(content, self.OPENING)
            self._buffer = content[len(content) - keep :]
            return self._gate.push(content[: len(content) - keep])
        parts = self._gate.push(content)
        self._buffer = marker + rest
        if start := rest.lstrip(_BLANKS):
            if start.startswith("{"):
                self._gate.block()
                self._buffer, self._is_inside = start, True
            else:
                parts += self._gate.push(marker)
                self._buffer = rest
        return parts

    def _inside(self) -> list[Part]:
        """A closing marker inside a JSON string does not close: the reader knows where its object ends."""
        parts, rest = self._calls.push(self._buffer)
        self._buffer = rest
        if rest and (not self.CLOSING.startswith(rest) or rest == self.CLOSING):
            self._buffer = rest.removeprefix(self.CLOSING)
            self._is_inside = False
        return parts


class Llama3Calls:
    """{"name": "f", "parameters": {...}}, several separated by semicolons, instead of content.

    An answer that does not begin with a brace (behind the optional <|python_tag|>) is content, and so is
    JSON that names no tool.
    """

    MARKER = "<|python_tag|>"

    def __init__(self) -> None:
        self._buffer = ""
        self._state = "before"
        self._calls = _Calls(separators=_BLANKS + ";")

    def push(self, text: str) -> list[Part]:
        if self._state == "content":
            return [Content(text)]
        if self._state == "before":
            self._buffer += text
            start = self._buffer.lstrip(_BLANKS)
            if not start or (self.MARKER.startswith(start) and start != self.MARKER):
                return []
            start = start.removeprefix(self.MARKER).lstrip(_BLANKS)
            if not start:
                return []
            if not start.startswith("{"):
                return self._as_content(self._buffer)
            self._state, text = "calls", start
        parts, rest = self._calls.push(text)
        return parts + (self._as_content(rest) if rest else [])

    def finish(self) -> list[Part]:
        return [Content(self._buffer)] if self._state == "before" else self._calls.finish()

    def _as_content(self, text: str) -> list[Part]:
        self._state, self._buffer = "content", ""
        return [Content(text)]


class JsonListCalls:
    """A JSON list of calls and nothing else: what a grammar leaves where a call is required."""

    def __init__(self, first_index: int = 0) -> None:
        self._calls = _Calls(separators=_BLANKS + "[,")
        self._calls.num_calls = first_index

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def push(self, text: str) -> list[Part]:
        return self.take(text)[0]

    def take(self, text: str) -> tuple[list[Part], str | None]:
        """Parts, and what follows the list: None while it goes on."""
        parts, rest = self._calls.push(text)
        if not rest:
            return parts, None
        return parts, rest.removeprefix("]")

    def finish(self) -> list[Part]:
        return self._calls.finish()


class NamedCall:
    """The arguments of one given tool and nothing else: what a grammar leaves where it must be called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_open = False
        self._reader = ValueReader()
        self._is_over = False

    def push(self, text: str) -> list[Part]:
        if not self._is_open:
            text = text.lstrip(_BLANKS)
        if not text or self._is_over:
            return []
        start: list[Part] = [] if self._is_open else [CallStart(0, self._name)]
        self._is_open = True
        value, rest = self._reader.push(text)
        self._is_over = rest is not None
        return [*start, CallArguments(0, value)]

    def finish(self) -> list[Part]:
        return []


class MistralCalls:
    """[TOOL_CALLS] and a JSON list of calls, or [TOOL_CALLS]name[ARGS]{...} for each call, behind content."""

    MARKER = "[TOOL_CALLS]"
    _ENDS_OF_NAME = ("[ARGS]", "[CALL_ID]", "{")

    def __init__(self) -> None:
        self._buffer = ""
        self._gate = ContentGate()
        self._state = "content"
        self._list = JsonListCalls()
        self._value = ValueReader()
        self._index = 0

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        steps = {
            "content": self._content,
            "marked": self._marked,
            "list": self._in_list,
            "name": self._name,
            "value": self._in_value,
        }
        while self._buffer:
            before = (self._state, len(self._buffer))
            parts += steps[self._state]()
            if before == (self._state, len(self._buffer)):
                break
        return parts

    def finish(self) -> list[Part]:
        held, self._buffer = self._buffer, ""
        if self._state == "content":
            return [*self._gate.push(held), *self._gate.finish()]
        if self._state == "list":
            return self._list.finish()
        if self._state == "name" and held.strip(_BLANKS):
            return [Content(self.MARKER + held)]
        return []

    def _content(self) -> list[Part]:
        content, marker, rest = self._buffer.partition(self.MARKER)
        if not marker:
            keep = held_length(content, self.MARKER)
            self._buffer = content[len(content) - keep :]
            return self._gate.push(content[: len(content) - keep])
        parts = self._gate.push(content)
        self._gate.block()
        self._buffer, self._state = rest, "marked"
        return parts

    def _marked(self) -> list[Part]:
        self._buffer = self._buffer.lstrip(_BLANKS)
        if self._buffer:
            self._state = "list" if self._buffer.startswith("[") else "name"
            self._list = JsonListCalls(self._index)
        return []

    def _in_list(self) -> list[Part]:
        parts, rest = self._list.take(self._buffer)
        self._index = self._list.num_calls
        self._buffer = rest or ""
        if rest is not None:
            self._state = "content"
        return parts

    def _name(self) -> list[Part]:
        """The arguments begin at the first brace; markers between it and the name say nothing we need."""
        head, brace, _ = self._buffer.partition("{")
        if not brace:
            return []
        name = min((head.partition(end)[0] for end in self._ENDS_OF_NAME), key=len).strip(_BLANKS)
        self._buffer = self._buffer[len(head) :]
        self._state, self._value = "value", ValueReader()
        self._index += 1
        return [CallStart(self._index - 1, name)]

    def _in_value(self) -> list[Part]:
        value, rest = self._value.push(self._buffer)
        self._buffer = rest or ""
        if rest is not None:
            self._state = "content"
        return [CallArguments(self._index - 1, value)]
