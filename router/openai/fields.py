"""Reads fields of a decoded JSON object and says exactly what is wrong with one.

Owns types, ranges and the wording of complaints. Must never know what a field is for.
"""

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from router.errors import BadRequest
from router.openai.json_text import NoJson, decode_json

_SHOWN_CHARS = 80


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object from a request body. Raises BadRequest."""
    try:
        value = decode_json(body)
    except NoJson as error:
        raise invalid_json(error) from error
    if not isinstance(value, dict):
        raise no_object(value)
    return value


def invalid_json(error: Exception) -> BadRequest:
    return BadRequest(f"the body must be valid JSON: {error}", code="invalid_json")


def no_object(value: object) -> BadRequest:
    return BadRequest(f"the body must be a JSON object, got {_kind(value)}", code="invalid_json")


def refuse(field: str, rule: str, value: object) -> BadRequest:
    """The complaint that `field` breaks `rule`; the caller raises it."""
    return BadRequest(f"{field} must be {rule}, got {shown(value)}", param=field)


def shown(value: object) -> str:
    """A value as an error message shows it: JSON, and not much of it."""
    if isinstance(value, str | list | tuple):
        value = value[: _SHOWN_CHARS + 1]
    text = msgspec.json.encode(value).decode() if _is_json(value) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


class Fields:
    """One JSON object. A field that is null counts as absent. Only `known` ones may be asked for."""

    def __init__(self, values: Mapping[str, Any], *, known: Container[str]) -> None:
        self._values = values
        self._known = known

    def raw(self, name: str) -> Any:
        assert name in self._known, f"{name} is in no table of router.openai.tables"
        return self._values.get(name)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise refuse(name, "true or false", value)
        return value

    def boolean_or_none(self, name: str) -> bool | None:
        return None if self.raw(name) is None else self.boolean(name)

    def integer(self, name: str, *, minimum: int | None = None, maximum: int | None = None) -> int | None:
        """JSON 5.0 is not an integer here, and neither is true."""
        value = self.raw(name)
        if value is None:
            return None
        if type(value) is not int:
            raise refuse(name, "an integer", value)
        if minimum is not None and value < minimum:
            raise refuse(name, f"at least {minimum}", value)
        if maximum is not None and value > maximum:
            raise refuse(name, f"at most {maximum}", value)
        return value

    def number(self, name: str) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        return as_number(name, value)

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise refuse(name, "a string", value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise refuse(name, "an object", value)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.raw(name)
        if value is None:
            return ()
        if isinstance(value, tuple):  # of a large body, whose decoder has seen that they are integers
            return value
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise refuse(name, "a list of integers", value)
        return tuple(value)


def as_number(name: str, value: object) -> float:
    """An int or float as a float; anything else is a BadRequest naming the field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(name, "a number", value)
    try:
        return float(value)
    except OverflowError as error:
        raise refuse(name, "a number of sensible size", value) from error


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")


def _is_json(value: object) -> bool:
    return value is None or isinstance(value, dict | list | tuple | str | int | float)
