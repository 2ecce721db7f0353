"""What clients send to say what form an answer has, and the grammar it becomes."""

import json
from typing import Any

import pytest

from router.errors import BadRequest
from router.openai.closing import closed_schema
from router.openai.requests import ChatRequest, read_chat, read_completion
from router.openai.responses import read_response
from router.requests import Constraint
from wire.work import GrammarSpec, json_schema_grammar

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT, LOOSE = (json_schema_grammar(SCHEMA, is_strict=is_strict) for is_strict in (True, False))
CLOSED = json_schema_grammar(SCHEMA | {"additionalProperties": False}, is_strict=False)
OBJECT = GrammarSpec(kind="json_object")


def schema_of(request: ChatRequest) -> Any:
    constraint = request.wishes.options.constraint
    assert constraint is not None
    return json.loads(constraint.spec.value)


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("field", "value", "spec", "named"),
    [
        ("response_format", {"type": "json_object"}, OBJECT, "response_format"),
        ("response_format", schema_format(strict=True), STRICT, "response_format.json_schema.schema"),
        ("response_format", schema_format(strict=False), LOOSE, "response_format.json_schema.schema"),
        ("response_format", schema_format(strict=None), CLOSED, "response_format.json_schema.schema"),
        ("structured_outputs", {"json": SCHEMA}, STRICT, "structured_outputs.json"),
        ("structured_outputs", {"json": json.dumps(SCHEMA)}, STRICT, "structured_outputs.json"),
        ("structured_outputs", {"json_object": True, "json": None}, OBJECT, "structured_outputs.json_object"),
        ("guided_json", SCHEMA, STRICT, "guided_json"),
        ("guided_json", json.dumps(SCHEMA), STRICT, "guided_json"),
        *(
            (field, value, spec, named)
            for option, given, spec in (
                ("regex", "a+", GrammarSpec(kind="regex", value="a+")),
                ("choice", ["a", "b"], GrammarSpec(kind="choice", choices=("a", "b"))),
                ("grammar", 'root ::= "a"', GrammarSpec(kind="ebnf", value='root ::= "a"')),
            )
            for field, value, named in (
                ("structured_outputs", {option: given}, f"structured_outputs.{option}"),
                (f"guided_{option}", given, f"guided_{option}"),
            )
        ),
    ],
)
def test_both_endpoints_take_every_form(field: str, value: Any, spec: GrammarSpec, named: str) -> None:
    expected = Constraint(spec=spec, field=named, is_for_words=field == "response_format")
    assert read_chat({**CHAT, field: value}).wishes.options.constraint == expected
    assert read_completion({"prompt": "hi", field: value}).wishes.options.constraint == expected


def test_text_asks_for_no_form() -> None:
    assert read_chat({**CHAT, "response_format": {"type": "text"}}).wishes.options.constraint is None


def test_a_response_takes_its_format_flat_and_repeats_it() -> None:
    given = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    request = read_response({"input": "hi", "text": {"format": given}})
    expected = Constraint(spec=STRICT, field="text.format.schema", is_for_words=True)
    assert request.wishes.options.constraint == expected
    assert request.shown["text"] == {"format": given, "verbosity": "medium"}
    plain = read_response({"input": "hi"})
    assert plain.wishes.options.constraint is None
    assert plain.shown["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


CLASS_SCHEMA: dict[str, Any] = {  # as pydantic makes it, where every object leaves the rest open
    "type": "object",
    "properties": {
        "home": {"$ref": "#/$defs/City"},
        "seen": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]}},
        "notes": {"type": "object", "additionalProperties": {"type": "string"}},
        "rest": {"type": "object"},
        "properties": {"type": "string"},
    },
    "required": ["home"],
    "$defs": {"City": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}


def test_a_schema_made_from_a_class_takes_only_what_the_class_has_unless_asked_otherwise() -> None:
    city = CLASS_SCHEMA["$defs"]["City"] | {"additionalProperties": False}
    closed = CLASS_SCHEMA | {"additionalProperties": False, "$defs": {"City": city}}
    sent = schema_format(schema=CLASS_SCHEMA)  # instructor's JSON_SCHEMA mode says nothing of strictness
    assert schema_of(read_chat({**CHAT, "response_format": sent})) == closed
    sent = schema_format(schema=CLASS_SCHEMA, strict=False)
    assert schema_of(read_chat({**CHAT, "response_format": sent})) == CLASS_SCHEMA


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"type": "object"}]},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {}},
        {"type": "object"},
    ],
)
def test_an_object_that_says_more_or_names_nothing_stays_open(schema: dict[str, Any]) -> None:
    assert closed_schema(schema) == schema


DEEP: Any = {}
for _ in range(200):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object with a type"),
        ({"response_format": {}}, "response_format.type", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", 'got "structural_tag"'),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "an object with a schema",
        ),
        (
            {"response_format": schema_format(schema="x")},
            "response_format.json_schema.schema",
            "a JSON schema",
        ),
        (
            {"response_format": schema_format(strict="yes")},
            "response_format.json_schema.strict",
            "true or false",
        ),
        (
            {"response_format": schema_format(name=7)},
            "response_format.json_schema.name",
            "must be a string, got 7",
        ),
        (
            {"response_format": schema_format(schema={"not": {}})},
            "response_format.json_schema.schema",
            "cannot be used: schema must not use 'not'",
        ),
        (
            {"response_format": schema_format(schema=DEEP)},
            "response_format.json_schema.schema",
            "at most 128 deep",
        ),
        ({"structured_outputs": []}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "with one of json, regex, choice, grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "with one of json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "a non-empty string"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "must be a JSON schema"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "a JSON schema, as an object"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "is not supported",
        ),
        ({"guided_choice": []}, "guided_choice", "a non-empty list of strings"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "a non-empty list of strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "cannot be used: choices must not be empty texts"),
        ({"guided_regex": 7}, "guided_regex", "a non-empty string"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "grammar must be at most 262144 bytes"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "must be left out: response_format already says what form the answer has",
        ),
    ],
)
def test_what_makes_no_grammar_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    for read, base in ((read_chat, CHAT), (read_completion, {"prompt": "hi"})):
        with pytest.raises(BadRequest) as caught:
            read({**base, **body})
        assert caught.value.param == param
        assert caught.value.message.startswith(param)
        assert message in caught.value.message
