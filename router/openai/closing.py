"""Schemas given without a word about strictness: an object takes the properties that it names, and no more.

Clients that make schemas from classes (instructor, LangChain) send neither "strict" nor
"additionalProperties", and a small model left to it goes on inventing properties.
Must never know where a schema comes from.
"""

from collections.abc import Mapping
from typing import Any

_SAYS_MORE = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
)
_NAMED = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "prefixItems")


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What follows it follows `schema`, whose depth must be bounded.

    Objects that say something of other properties, or name none, keep their meaning.
    """
    closed = {key: _parts(key, value, schema) for key, value in schema.items()}
    if schema.get("properties") and not _SAYS_MORE & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _parts(key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _part(one) for name, one in value.items()}
    if key in _LISTED and isinstance(value, list) and "properties" not in schema:
        return [_part(one) for one in value]
    return _part(value) if key == "items" else value


def _part(value: Any) -> Any:
    return closed_schema(value) if isinstance(value, dict) else value
