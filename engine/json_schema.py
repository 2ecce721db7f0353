"""Which JSON schemas can be enforced as a grammar.

Owns the keywords that a compiled schema would silently not hold to: such a schema is refused by name, so
that an answer which is complete always validates. Must never know tokens or a compiler.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType, NoneType
from typing import Any

MAX_DEPTH = 128
"""Nested objects and lists of a schema; the time to compile grows faster than the depth."""

_NOT_ENFORCED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_NEEDS_TYPE = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
"""Held to only beside `type`."""

_ALONE = ("anyOf", "oneOf", "allOf", "$ref")
"""Beside one of these no keyword that says more is held to."""

_SAYS_MORE = (*_NEEDS_TYPE, "properties", "patternProperties", "required", "items", "prefixItems", *_ALONE)

_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "string": (str,),
        "boolean": (bool,),
        "null": (NoneType,),
        "array": (list, tuple),
        "object": (Mapping,),
        "integer": (int,),
        "number": (int, float),
    }
)

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError naming the place and the keyword of the first thing that cannot be enforced."""
    _check_depth(schema)
    pending: list[tuple[str, Any]] = [("schema", schema)]
    while pending:
        place, part = pending.pop()
        if isinstance(part, Mapping):
            _check_keywords(place, part)
            pending += _parts(place, part)
        elif not isinstance(part, bool):
            raise ValueError(f"{place} must be a schema, got {str(part)[:80]!r}")


def _check_depth(schema: Mapping[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value) if isinstance(child, Mapping | list)]
        if not level:
            return
    raise ValueError(f"schema must be nested at most {MAX_DEPTH} deep, got more")


def _children(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, Mapping) else value)


def _check_keywords(place: str, part: Mapping[str, Any]) -> None:
    for keyword in part:
        if keyword in _NOT_ENFORCED and part[keyword] is not False:
            raise ValueError(f"{place} must not use {keyword!r}: it cannot be enforced")
    if len(part.get("allOf", ())) > 1:
        raise ValueError(f"{place} must not use 'allOf' with more than one schema: it cannot be enforced")
    if not str(part.get("$ref", "#")).startswith("#"):
        raise ValueError(f"{place} must refer to itself in '$ref', got {part['$ref']!r}")
    for combining in _ALONE:
        for keyword in _SAYS_MORE:
            if combining in part and keyword in part and keyword != combining:
                raise ValueError(f"{place} must not give {keyword!r} beside {combining!r}: use one of them")
    if "type" not in part and "const" not in part and "enum" not in part:
        for keyword in _NEEDS_TYPE:
            if keyword in part:
                raise ValueError(f"{place} must give 'type' beside {keyword!r}, or it cannot be enforced")
    _check_values(place, part)
    if "pattern" in part and ("minLength" in part or "maxLength" in part):
        raise ValueError(f"{place} must not give a length beside 'pattern': it cannot be enforced")
    properties, required = part.get("properties", {}), part.get("required", ())
    if isinstance(properties, Mapping) and isinstance(required, list):
        for name in required:
            if name not in properties:
                raise ValueError(f"{place} must describe in 'properties' what it requires, lacks {name!r}")


def _check_values(place: str, part: Mapping[str, Any]) -> None:
    """Where values are listed their type is not held to, nor, among several, a bound."""
    for keyword in _SAYS_MORE:
        if "enum" in part and keyword in part:
            raise ValueError(f"{place} must not give {keyword!r} beside 'enum': it cannot be enforced")
    types = part.get("type")
    if types is None:
        return
    named = [types] if isinstance(types, str) else types
    for value in _listed(part):
        if not any(_has_type(value, name) for name in named):
            shown = str(value)[:80]
            raise ValueError(f"{place} must give only values of type {types!r}, got {shown!r}")


def _listed(part: Mapping[str, Any]) -> list[Any]:
    values = part.get("enum", ())
    constant = [part["const"]] if "const" in part else []
    return [*values, *constant] if isinstance(values, list | tuple) else constant


def _has_type(value: Any, name: str) -> bool:
    """As JSON has it: true is no number, and 2.0 is an integer."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ()))


def _parts(place: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _BY_NAME:
        named = part.get(keyword, {})
        if not isinstance(named, Mapping):
            raise ValueError(f"{place}.{keyword} must be an object, got {str(named)[:80]!r}")
        yield from ((f"{place}.{keyword}.{name}", value) for name, value in named.items())
    for keyword in _LISTS:
        listed = part.get(keyword, ())
        if not isinstance(listed, list | tuple):
            raise ValueError(f"{place}.{keyword} must be a list, got {str(listed)[:80]!r}")
        yield from ((f"{place}.{keyword}[{index}]", value) for index, value in enumerate(listed))
    for keyword in _SINGLE:
        if keyword in part:
            yield f"{place}.{keyword}", part[keyword]
