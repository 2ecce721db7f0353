"""The parts of a chat answer as fields of its deltas and of its message.

Owns the form of reasoning and tool calls in JSON, and the ids of calls. Must never know how a model
writes them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from router.text.parsers.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning, merged

Json = dict[str, Any]


class ChatParts:
    """One answer. `push` and `finish` give what is new; `message` is what all of it has come to.

    `max_calls` None: as many as the model makes; further ones are left out. `is_free`: the model could
    have chosen another tool, or none.
    """

    def __init__(
        self,
        parser: Parser,
        *,
        new_call_id: Callable[[], str],
        max_calls: int | None = None,
        is_free: bool = True,
    ) -> None:
        self._is_free = is_free
        self._parser = parser
        self._new_call_id = new_call_id
        self._max_calls = max_calls
        self._content = ""
        self._reasoning = ""
        self._calls: list[Json] = []

    def finish_reason(self, reason: str) -> str:
        """What a client is told: an answer that ended by itself with a call waits for the tool."""
        return "tool_calls" if reason == "stop" and self._calls and self._is_free else reason

    def push(self, text: str) -> Json:
        """Fields of a delta, none when everything is held back."""
        return self._delta(self._parser.push(text))

    def finish(self) -> Json:
        return self._delta(self._parser.finish())

    def message(self) -> Json:
        """Fields of a message. Content is null where calls or reasoning are all there is."""
        fields: Json = {"content": self._content or (None if self._calls or self._reasoning else "")}
        if self._reasoning:
            fields["reasoning_content"] = self._reasoning
        if self._calls:
            fields["tool_calls"] = self._calls
        return fields

    def _delta(self, parts: Sequence[Part]) -> Json:
        delta: Json = {}
        for part in merged(parts):
            match part:
                case Content(text):
                    self._content += text
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    self._reasoning += text
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallStart(index, name):
                    self._start(index, name, delta)
                case CallArguments(index, text):
                    self._argue(index, text, delta)
        return delta

    def _start(self, index: int, name: str, delta: Json) -> None:
        if self._max_calls is not None and index >= self._max_calls:
            return
        call: Json = {"id": self._new_call_id(), "type": "function"}
        self._calls.append({**call, "function": {"name": name, "arguments": ""}})
        shown = {"index": index, **call, "function": {"name": name, "arguments": ""}}
        delta.setdefault("tool_calls", []).append(shown)

    def _argue(self, index: int, text: str, delta: Json) -> None:
        if index >= len(self._calls):
            return
        self._calls[index]["function"]["arguments"] += text
        shown = delta.setdefault("tool_calls", [])
        if not shown or shown[-1]["index"] != index:
            shown.append({"index": index, "function": {"arguments": ""}})
        shown[-1]["function"]["arguments"] += text
