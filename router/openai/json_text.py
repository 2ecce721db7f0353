"""JSON from outside to values. Owns how deep it may be nested: templates and encoders go through values by
calling themselves, and must never come to the interpreter's end of it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

MAX_DEPTH: Final = 256


class NoJson(ValueError):
    """The text is no JSON, or nested too deep."""


def decode_json(text: bytes | str) -> Any:
    """Raises NoJson."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoJson(str(error)) from error
    if _num_opened(text) > MAX_DEPTH and _is_deeper(value):
        raise NoJson(f"nested deeper than {MAX_DEPTH} levels")
    return value


def _num_opened(text: bytes | str) -> int:
    """No value is nested deeper than that."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_deeper(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _children(one) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value
