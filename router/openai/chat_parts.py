"""The parts of a chat answer as fields of its deltas and of its message.

Owns the form of reasoning and tool calls in JSON. Must never know how a model writes them.
"""

from collections.abc import Sequence
from typing import Any

from router.openai.answer_parts import AnswerParts
from router.text.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning

Json = dict[str, Any]


class ChatParts:
    """One answer. `push` and `finish` give what is new; `message` is what all of it has come to."""

    def __init__(self, answer: AnswerParts) -> None:
        self._answer = answer
        self._content = ""
        self._reasoning = ""
        self._calls: list[Json] = []

    def finish_reason(self, reason: str) -> str:
        """What a client is told: an answer that ended by itself with a call waits for the tool."""
        return "tool_calls" if reason == "stop" and self._calls and self._answer.is_free else reason

    def push(self, text: str) -> Json:
        """Fields of a delta, none when everything is held back."""
        return self._delta(self._answer.push(text))

    def finish(self) -> Json:
        return self._delta(self._answer.finish())

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
        for part in parts:
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
        call: Json = {"id": self._answer.new_call_id(), "type": "function"}
        self._calls.append({**call, "function": {"name": name, "arguments": ""}})
        shown = {"index": index, **call, "function": {"name": name, "arguments": ""}}
        delta.setdefault("tool_calls", []).append(shown)

    def _argue(self, index: int, text: str, delta: Json) -> None:
        self._calls[index]["function"]["arguments"] += text
        shown = delta.setdefault("tool_calls", [])
        if not shown or shown[-1]["index"] != index:
            shown.append({"index": index, "function": {"arguments": ""}})
        shown[-1]["function"]["arguments"] += text
