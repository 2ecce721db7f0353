"""Which JSON schemas can be enforced as a grammar.

Owns the keywords that a compiled schema would silently not hold to: such a schema is refused by name, so
that an answer which is complete always validates. Must never know tokens or a compiler.
"""

from collections.abc import Iterator, Mapping, Sequence
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
            _check_branches(place, part, schema)
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
    if "type" not in part:
        return
    for value in _listed(part):
        if not _has_type(value, _types(part)):
            shown = str(value)[:80]
            raise ValueError(f"{place} must give only values of type {part['type']!r}, got {shown!r}")


def _check_branches(place: str, part: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    """A type is not held to beside other schemas, so it may only repeat what they say."""
    if "type" not in part:
        return
    for combining in _ALONE:
        if not all(_is_within(one, _types(part), root) for one in _branches(part, combining)):
            raise ValueError(
                f"{place} must not give 'type' beside {combining!r} unless every schema there is of that type"
            )


def _branches(part: Mapping[str, Any], combining: str) -> Sequence[Any]:
    if combining == "$ref":
        return [{"$ref": part["$ref"]}] if "$ref" in part else []
    listed = part.get(combining, ())
    return listed if isinstance(listed, list | tuple) else ()


def _is_within(branch: Any, types: Sequence[Any], root: Mapping[str, Any]) -> bool:
    """Whether all that `branch` allows is of these types, as far as is easily seen."""
    pending, seen = [branch], set[int]()
    while pending:
        one = pending.pop()
        if not isinstance(one, Mapping):
            return False
        if "$ref" in one:
            one = _referred(str(one["$ref"]), root)
            if id(one) not in seen:
                seen.add(id(one))
                pending.append(one)
        elif "const" in one or "enum" in one:
            if not all(_has_type(value, types) for value in _listed(one)):
                return False
        elif "type" in one:
            if not all(name in types or (name == "integer" and "number" in types) for name in _types(one)):
                return False
        else:
            nested = [inner for combining in _ALONE for inner in _branches(one, combining)]
            if not nested:
                return False
            pending += nested
    return True


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _types(part: Mapping[str, Any]) -> Sequence[Any]:
    types = part["type"]
    return types if isinstance(types, list | tuple) else [types]


def _listed(part: Mapping[str, Any]) -> list[Any]:
    values = part.get("enum", ())
    constant = [part["const"]] if "const" in part else []
    return [*values, *constant] if isinstance(values, list | tuple) else constant


def _has_type(value: Any, types: Sequence[Any]) -> bool:
    """As JSON has it: true is no number, and 2.0 is an integer."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer():
        return "integer" in types or "number" in types
    return any(isinstance(value, _TYPES.get(str(name), ())) for name in types)


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
