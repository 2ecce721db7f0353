"""What a body asks of the form of its answer: OpenAI's formats and vLLM's structured outputs, as one grammar.

Owns the shapes in which a grammar is asked for. Must never know how one is compiled: the nodes refuse what
means nothing, and their word comes back under the field named here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from router.errors import BadRequest
from router.openai.closing import closed_schema
from router.openai.fields import Fields, refuse
from router.openai.json_text import NoJson, decode_json
from router.requests import Constraint
from wire.work import GrammarSpec, json_schema_grammar

_OPTIONS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def read_constraint(fields: Fields) -> Constraint | None:
    """From response_format, structured_outputs or the older guided_* fields. Raises BadRequest."""
    found = [read_format("response_format", fields.raw("response_format"))]
    found.append(_structured(fields.raw("structured_outputs")))
    for name, option in _GUIDED.items():
        value = fields.raw(name)
        found.append(None if value is None else read_option(name, option, value))
    asked = [one for one in found if one is not None]
    if len(asked) > 1:
        raise BadRequest(
            f"{asked[1].field} must be left out: {asked[0].field} already says what form the answer has",
            param=asked[1].field,
        )
    return asked[0] if asked else None


def read_format(where: str, value: Any, *, nests_schema: bool = True) -> Constraint | None:
    """OpenAI's `{"type": "text" | "json_object" | "json_schema"}`, which calls of tools need not have;
    `nests_schema`: under "json_schema"."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refuse(where, "an object with a type", value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(spec=GrammarSpec(kind="json_object"), field=where, is_for_words=True)
    if kind != "json_schema":
        raise refuse(f"{where}.type", "text, json_object or json_schema", kind)
    if nests_schema:
        where, value = f"{where}.json_schema", value.get("json_schema")
        if not isinstance(value, dict):
            raise refuse(where, "an object with a schema", value)
    name, strict = value.get("name", ""), value.get("strict")
    if not isinstance(name, str):
        raise refuse(f"{where}.name", "a string", name)
    if strict is not None and not isinstance(strict, bool):
        raise refuse(f"{where}.strict", "true or false", strict)
    constraint = schema_constraint(f"{where}.schema", value.get("schema"), is_strict=strict)
    return replace(constraint, is_for_words=True)


def schema_constraint(where: str, schema: Any, *, is_strict: bool | None) -> Constraint:
    """JSON that follows `schema`, which came in the field `where`. Raises BadRequest.

    `is_strict` None, nothing was said: closed as far as the schema leaves it open.
    """
    if not isinstance(schema, dict):
        raise refuse(where, "a JSON schema, as an object", schema)
    given = _made(where, lambda: json_schema_grammar(schema, is_strict=is_strict is True))
    if is_strict is not None:
        return given
    return _made(where, lambda: json_schema_grammar(closed_schema(schema), is_strict=False))


def _structured(value: Any) -> Constraint | None:
    """vLLM's object that has one of `_OPTIONS`."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refuse("structured_outputs", "an object", value)
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    for name in given:
        if name not in _OPTIONS:
            field = f"structured_outputs.{name}"
            raise BadRequest(f"{field} is not supported", param=field, code="unsupported_parameter")
    if len(given) != 1:
        raise refuse("structured_outputs", f"an object with one of {', '.join(_OPTIONS)}", value)
    ((name, one),) = given.items()
    return read_option(f"structured_outputs.{name}", name, one)


def read_option(where: str, option: str, value: Any, *, is_strict: bool = True) -> Constraint:
    """One of the structured outputs, from the field `where`. Raises BadRequest."""
    match option:
        case "json":
            return schema_constraint(where, _parsed(where, value), is_strict=is_strict)
        case "json_object":
            if value is not True:
                raise refuse(where, "true or false", value)
            return Constraint(spec=GrammarSpec(kind="json_object"), field=where)
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
                raise refuse(where, "a non-empty list of strings", value)
            return _made(where, lambda: GrammarSpec(kind="choice", choices=tuple(value)))
        case _:
            kind: Literal["regex", "ebnf"] = "regex" if option == "regex" else "ebnf"
            if not isinstance(value, str) or not value:
                raise refuse(where, "a non-empty string", value)
            return _made(where, lambda: GrammarSpec(kind=kind, value=value))


def _parsed(where: str, value: Any) -> Any:
    """A schema may come as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value)
    except NoJson as error:
        raise BadRequest(f"{where} must be a JSON schema: {error}", param=where) from error


def _made(where: str, make: Callable[[], GrammarSpec]) -> Constraint:
    try:
        return Constraint(spec=make(), field=where)
    except ValueError as error:
        raise BadRequest(f"{where} cannot be used: {error}", param=where) from error


def shown_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a response repeats of the `text` it was asked with."""
    return {"format": value.get("format") or {"type": "text"}, "verbosity": "medium"}
