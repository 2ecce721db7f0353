"""The input of a response as chat messages: what was said, thought, called and answered, item by item.

Owns which items are one message of the assistant. Must never know chat templates.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from router.errors import BadRequest
from router.openai.fields import refuse
from router.openai.messages import (
    Message,
    call_message,
    read_arguments,
    read_content,
    read_message,
    read_text,
)

_TEXTS = ("content", "reasoning_content")
_PART_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


def read_input(value: Any) -> tuple[Message, ...]:
    """A string is one message of the user; items may be the model's own earlier ones. Raises BadRequest."""
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise refuse("input", "a string or a non-empty list of items", value)
    messages: list[Message] = []
    for index, item in enumerate(value):
        if (message := _read(f"input[{index}]", item)) is not None:
            _add(messages, message)
    return tuple(_whole(message) for message in messages)


def _add(messages: list[Message], new: Message) -> None:
    """Items of one answer are one message, as a chat has it. Its texts are in pieces until it is whole."""
    new = new | {key: [new[key]] if new[key] else [] for key in _TEXTS if key in new}
    if not messages or not _goes_on(messages[-1], new):
        messages.append(new)
        return
    for key in (*_TEXTS, "tool_calls"):
        if key in new:
            messages[-1].setdefault(key, []).extend(new[key])


def _whole(message: Message) -> Message:
    return message | {key: "".join(message[key]) for key in _TEXTS if key in message}


def _goes_on(last: Message, new: Message) -> bool:
    """Calls follow whatever the assistant said; words follow thoughts or calls, and two messages stay two;
    thoughts follow thoughts only."""
    if not last["role"] == new["role"] == "assistant":
        return False
    if "tool_calls" in new:
        return True
    has_only_thoughts = not last["content"] and "tool_calls" not in last
    if "reasoning_content" in new:
        return has_only_thoughts
    return "tool_calls" in last or ("reasoning_content" in last and has_only_thoughts)


def _read(where: str, item: Any) -> Message | None:
    if not isinstance(item, dict):
        raise refuse(where, "an object", item)
    kind = "message" if item.get("type") is None else item["type"]
    read = _KINDS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise BadRequest(f"{where}.type {kind!r} is not supported", param=f"{where}.type")
    return read(where, item)


def _said(where: str, item: Mapping[str, Any]) -> Message:
    if item.get("role") == "tool":
        raise refuse(f"{where}.role", "one of system, developer, user, assistant", "tool")
    return read_message(where, {**item, "content": _as_text(item.get("content"))})


def _thought(where: str, item: Mapping[str, Any]) -> Message | None:
    """In words, or in summary; None for an item that has neither."""
    if item.get("encrypted_content") is not None:
        field = f"{where}.encrypted_content"
        raise BadRequest(f"{field} is not supported", param=field, code="unsupported_parameter")
    for key in ("content", "summary"):
        if item.get(key):
            text = read_content(f"{where}.{key}", _as_text(item[key]))
            return {"role": "assistant", "content": "", "reasoning_content": text}
    return None


def _called(where: str, item: Mapping[str, Any]) -> Message:
    call = call_message(
        read_text(f"{where}.call_id", item.get("call_id")),
        read_text(f"{where}.name", item.get("name")),
        read_arguments(f"{where}.arguments", item.get("arguments")),
    )
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _answered(where: str, item: Mapping[str, Any]) -> Message:
    return {
        "role": "tool",
        "tool_call_id": read_text(f"{where}.call_id", item.get("call_id")),
        "content": read_content(f"{where}.output", _as_text(item.get("output"))),
    }


def _as_text(content: Any) -> Any:
    """Parts under the one name that messages have for text."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _PART_TYPES else part
        for part in content
    ]


_KINDS: Mapping[str, Callable[[str, Mapping[str, Any]], Message | None]] = MappingProxyType(
    {
        "function_call": _called,
        "function_call_output": _answered,
        "message": _said,
        "reasoning": _thought,
    }
)
