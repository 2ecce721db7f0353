"""Chat messages: which roles and contents are taken, and how they are shown to a chat template."""

from typing import Any

from router.errors import BadRequest
from router.openai.fields import refuse

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_REFUSED_KEYS = ("tool_calls", "function_call", "audio")


def read_messages(value: Any) -> tuple[Message, ...]:
    """Messages with text content only. Raises BadRequest naming the message."""
    if not isinstance(value, list) or not value:
        raise refuse("messages", "a non-empty list of messages", value)
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise refuse(where, "an object with role and content", value)
    role = value.get("role")
    if role in ("tool", "function"):
        raise BadRequest(f"{where}.role {role!r} is not supported", param=f"{where}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refuse(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    for key in _REFUSED_KEYS:
        if value.get(key):
            raise BadRequest(
                f"{where}.{key} is not supported", param=f"{where}.{key}", code="unsupported_parameter"
            )
    message: Message = {"role": _ROLES[role], "content": _content(f"{where}.content", value.get("content"))}
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise refuse(f"{where}.name", "a string", name)
        message["name"] = name
    return message


def _content(where: str, value: Any) -> str:
    """Text parts are joined by newlines: templates are written for strings."""
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
