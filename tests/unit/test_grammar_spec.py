import json
from typing import Any

import pytest

from engine.grammar_spec import MAX_CHOICES, GrammarSpec, json_schema_grammar
from engine.json_schema import MAX_DEPTH

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (GrammarSpec(kind="json_object"), '{"kind": "json_object"}'),
        (GrammarSpec(kind="regex", value="é+"), '{"kind": "regex", "value": "\\u00e9+"}'),
        (GrammarSpec(kind="ebnf", value='root ::= "a"'), '{"kind": "ebnf", "value": "root ::= \\"a\\""}'),
        (GrammarSpec(kind="choice", choices=("a", "b")), '{"kind": "choice", "value": ["a", "b"]}'),
        (
            json_schema_grammar({"type": "string"}, is_strict=False),
            '{"kind": "json_schema", "value": "{\\"type\\": \\"string\\"}", "strict": false}',
        ),
    ],
)
def test_every_kind_travels_as_text(spec: GrammarSpec, text: str) -> None:
    assert spec.to_text() == text
    assert GrammarSpec.from_text(text) == spec


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "grammar: text must be JSON"),
        ("[]", "grammar: text must be a JSON object"),
        ("root ::= 'a'", "grammar: text must be JSON"),
        ("[" * 100_000, "grammar: text must be JSON"),
        (" " * 300_000, "grammar: must be at most 262144 bytes, got 300000"),
        ('{"kind": "lark", "value": "x"}', "grammar: kind must be one of"),
        ('{"kind": 5, "value": "x"}', "grammar: kind must be a text"),
        ('{"kind": "regex"}', "grammar: value must be set for regex, got ''"),
        ('{"kind": "regex", "value": 5}', "grammar: kind must be a text and value a text or a list of texts"),
        ('{"kind": "regex", "value": "\\ud800"}', "grammar: value must be valid Unicode"),
        ('{"kind": "json_object", "value": "x"}', "grammar: value must be empty for json_object"),
        ('{"kind": "choice", "value": []}', "grammar: choices must be set"),
        ('{"kind": "choice", "value": ["a", 1]}', "grammar: kind must be a text and value a text"),
        ('{"kind": "choice", "value": ["a", ""]}', "grammar: choices must not be empty texts"),
        ('{"kind": "json_schema", "value": "[]"}', "grammar: value must be a JSON object"),
        ('{"kind": "json_schema", "value": "{}", "strict": 1}', "grammar: strict must be true or false"),
        ('{"kind": "json_object", "flavour": 1}', "grammar: fields must be kind, value and strict"),
    ],
)
def test_malformed_text_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        GrammarSpec.from_text(text)
    assert str(caught.value).startswith(reason)


def test_choices_are_bounded() -> None:
    with pytest.raises(ValueError, match=f"choices must be at most {MAX_CHOICES}"):
        GrammarSpec(kind="choice", choices=("a",) * (MAX_CHOICES + 1))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "not": {"const": "a"}}, "schema must not use 'not'"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
            "schema.properties.a must not use 'uniqueItems'",
        ),
        ({"$defs": {"x": {"if": True}}}, "schema.$defs.x must not use 'if'"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "schema must not use 'allOf' with more than one"),
        ({"anyOf": [{"minimum": 3}]}, "schema.anyOf[0] must give 'type' beside 'minimum'"),
        ({"$ref": "http://x/y"}, "schema must refer to itself in '$ref', got 'http://x/y'"),
        ({"anyOf": [PERSON], "required": ["name"]}, "schema must not give 'required' beside 'anyOf'"),
        ({"type": "string", "pattern": "a+", "minLength": 3}, "schema must not give a length beside 'patt"),
        ({"type": "integer", "enum": [1, "a"]}, "schema must give only values of type 'integer', got 'a'"),
        (
            {"type": ["number", "null"], "enum": [1, True]},
            "schema must give only values of type ['number', 'nu",
        ),
        ({"type": "string", "const": None}, "schema must give only values of type 'string', got 'None'"),
        ({"type": "integer", "enum": [1, 50], "maximum": 9}, "schema must not give 'maximum' beside 'enum'"),
        ({"enum": ["a", "b"], "anyOf": [{"const": "a"}]}, "schema must not give 'anyOf' beside 'enum'"),
        (
            {"type": "string", "anyOf": [{"const": "a"}, {"type": "integer"}]},
            "schema must not give 'type' beside 'anyOf' unless every schema there is of that type",
        ),
        ({"type": "string", "allOf": [{"minLength": 3, "type": "null"}]}, "'type' beside 'allOf' unless"),
        (
            {"type": "integer", "$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}},
            "beside '$ref' unless",
        ),
        (
            {"type": "string", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {}}},
            "unless every",
        ),
        ({"type": "string", "$ref": "#/$defs/a/b", "$defs": {"a": {}}}, "'type' beside '$ref' unless"),
        ({"type": "object", "required": ["a"]}, "schema must describe in 'properties' what it requires"),
        ({"type": "array", "items": "string"}, "schema.items must be a schema, got 'string'"),
        ({"type": "array", "prefixItems": {}}, "schema.prefixItems must be a list, got '{}'"),
        ({"type": "object", "properties": []}, "schema.properties must be an object, got '[]'"),
        ({"const": {1, 2}}, "schema must be JSON: Object of type set is not JSON serializable"),
        ({"const": float("nan")}, "Out of range float values are not JSON compliant"),
    ],
)
def test_a_schema_that_would_not_be_held_to_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        json_schema_grammar(schema, is_strict=True)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {"type": "object", "properties": {"not": {"type": "string"}, "if": PERSON}, "required": ["not"]},
        {"enum": [{"not": 1}, "uniqueItems"]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "integer", "enum": [1, 2.0]},
        {"type": ["number", "null"], "anyOf": [{"type": "integer"}, {"const": None}, {"enum": [1.5]}]},
        {"type": "string", "$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}},
        {"type": "object", "anyOf": [{"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"oneOf": [PERSON]}}},
        {"type": "object", "const": {"a": [1]}},
        {"type": "array", "uniqueItems": False, "items": {"const": 3, "minimum": 1}},
        {
            "allOf": [{"$ref": "#/$defs/P"}],
            "$defs": {"P": PERSON},
            "description": "not",
            "default": {"if": 1},
        },
    ],
)
def test_names_and_values_are_not_taken_for_keywords(schema: dict[str, Any]) -> None:
    assert json.loads(json_schema_grammar(schema, is_strict=True).value) == schema


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        for _ in range(depth - 1):
            schema = {"items": schema}
        return schema

    assert json_schema_grammar(nested(MAX_DEPTH), is_strict=True).kind == "json_schema"
    for depth in (MAX_DEPTH + 1, 50_000):
        with pytest.raises(ValueError, match=f"schema must be nested at most {MAX_DEPTH} deep, got more"):
            json_schema_grammar(nested(depth), is_strict=True)
