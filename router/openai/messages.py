"""Chat messages: which roles and contents are taken, and how they are shown to a chat template."""

from collections.abc import Mapping
from typing import Any

from router.errors import BadRequest
from router.openai.fields import refuse
from router.openai.json_text import NoJson, decode_json

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REFUSED_KEYS = ("function_call", "audio")
_REASONING_KEYS = ("reasoning_content", "reasoning")


def read_messages(value: Any) -> tuple[Message, ...]:
    """Messages with text content only. Raises BadRequest naming the message."""
    if not isinstance(value, list) or not value:
        raise refuse("messages", "a non-empty list of messages", value)
    return tuple(read_message(f"messages[{index}]", item) for index, item in enumerate(value))


def read_message(where: str, value: Any) -> Message:
    """Raises BadRequest."""
    if not isinstance(value, dict):
        raise refuse(where, "an object with role and content", value)
    role = value.get("role")
    if role == "function":
        raise BadRequest(f"{where}.role {role!r} is not supported", param=f"{where}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refuse(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    for key in _REFUSED_KEYS:
        if value.get(key):
            raise BadRequest(
                f"{where}.{key} is not supported", param=f"{where}.{key}", code="unsupported_parameter"
            )
    message: Message = {"role": _ROLES[role]}
    if role == "assistant":
        message |= _said_by_assistant(where, value)
    elif value.get("tool_calls"):
        raise refuse(f"{where}.tool_calls", "left out unless the role is assistant", value["tool_calls"])
    if role == "tool":
        message["tool_call_id"] = read_text(f"{where}.tool_call_id", value.get("tool_call_id"))
    if "tool_calls" in message and value.get("content") is None:
        message["content"] = ""  # clients send calls back with null; many templates add to it without asking
    elif role == "assistant":
        message["content"] = _answered(where, value)
    else:
        message["content"] = read_content(f"{where}.content", value.get("content"))
    if value.get("name") is not None:
        message["name"] = read_text(f"{where}.name", value["name"])
    return message


def _said_by_assistant(where: str, value: Mapping[str, Any]) -> Message:
    """What only the assistant's messages may have."""
    message: Message = {}
    for key in _REASONING_KEYS:
        if value.get(key) is not None:
            message["reasoning_content"] = read_text(f"{where}.{key}", value[key])
    calls = value.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise refuse(f"{where}.tool_calls", "a list of calls", calls)
        message["tool_calls"] = [
            _call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)
        ]
    return message


def _call(where: str, value: Any) -> Message:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise refuse(where, 'an object of type "function"', value)
    function = value.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{where}.function", "an object with name and arguments", function)
    return call_message(
        read_text(f"{where}.id", value.get("id")),
        read_text(f"{where}.function.name", function.get("name")),
        read_arguments(f"{where}.function.arguments", function.get("arguments")),
    )


def call_message(call_id: str, name: str, arguments: Mapping[str, Any]) -> Message:
    """A call as templates expect it: with its arguments as an object, not as text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(where: str, value: Any) -> Mapping[str, Any]:
    """A call's arguments, which clients write as a string. Raises BadRequest."""
    arguments = value
    if isinstance(value, str):
        try:
            arguments = decode_json(value or "{}")
        except NoJson:
            arguments = None
    if not isinstance(arguments, dict):
        raise refuse(where, "a JSON object, written as a string", value)
    return arguments


def read_text(where: str, value: Any) -> str:
    """Raises BadRequest."""
    if not isinstance(value, str):
        raise refuse(where, "a string", value)
    return value


def _answered(where: str, value: Mapping[str, Any]) -> str:
    """What the assistant said. That it refused something it said in a field or in parts of their own."""
    content, refusal = value.get("content"), value.get("refusal")
    if content is None and refusal is not None:
        return read_text(f"{where}.refusal", refusal)
    if isinstance(content, list):
        content = [_as_text(part) for part in content]
    return read_content(f"{where}.content", content)


def _as_text(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def read_content(where: str, value: Any) -> str:
    """Text parts are joined by newlines: templates are written for strings. Raises BadRequest."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refuse(where, "a string or a list of text parts", value)
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(value))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise refuse(where, 'an object {"type": "text", "text": ...}', part)
    if part.get("type") != "text":
        raise refuse(f"{where}.type", '"text" (other parts are not supported)', part.get("type"))
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse(f"{where}.text", "a string", text)
    return text
