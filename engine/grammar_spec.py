"""What a request's output must look like: a plain value, and the text it travels as.

Owns the kinds of grammar and their limits. Must never know tokens or how a grammar is compiled. No torch:
the router builds these too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.json_schema import check_schema

Kind = Literal["json_object", "json_schema", "regex", "ebnf", "choice"]
KINDS: tuple[str, ...] = get_args(Kind)
MAX_GRAMMAR_BYTES = 256 * 1024
"""Of the text that travels."""

MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """Every instance is well formed: bad values raise ValueError naming the field. Whether a pattern or an
    EBNF text means anything is the compiler's to say.

    value: the schema as JSON text, the regular expression (of the whole output) or the EBNF text (GBNF, rule
        `root`); "" for the other kinds. choices: the texts to choose from, for "choice".
    is_strict: for "json_schema": objects may hold only the properties their schema names.
    """

    kind: Kind
    value: str = ""
    choices: tuple[str, ...] = ()
    is_strict: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if bool(self.choices) != (self.kind == "choice"):
            raise ValueError(f"choices must be {_expected(self.kind == 'choice')}, got {self.choices!r}")
        if bool(self.value) != (self.kind in ("json_schema", "regex", "ebnf")):
            raise ValueError(f"value must be {_expected(not self.value)} for {self.kind}, got {self.value!r}")
        if len(self.choices) > MAX_CHOICES:
            raise ValueError(f"choices must be at most {MAX_CHOICES}, got {len(self.choices)}")
        for text in (self.value, *self.choices):
            _check_unicode(text)
        if "" in self.choices:
            raise ValueError("choices must not be empty texts, got ''")
        if self.kind == "json_schema":
            check_schema(_object("value", self.value))
        if (size := len(self.to_text())) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar must be at most {MAX_GRAMMAR_BYTES} bytes, got {size}")

    def to_text(self) -> str:
        """The same value as ASCII JSON, as `from_text` reads it."""
        content: dict[str, Any] = {"kind": self.kind}
        if self.kind != "json_object":
            content["value"] = list(self.choices) if self.kind == "choice" else self.value
        if self.kind == "json_schema":
            content["strict"] = self.is_strict
        return json.dumps(content)

    @staticmethod
    def from_text(text: str) -> "GrammarSpec":
        """Raises ValueError beginning with "grammar" for anything `to_text` cannot have written."""
        try:
            return _read(text)
        except ValueError as error:
            raise ValueError(f"grammar: {error}") from error


def json_schema_grammar(schema: Mapping[str, Any], *, is_strict: bool) -> GrammarSpec:
    """JSON text that follows `schema`. Raises ValueError for one that cannot be written or enforced."""
    check_schema(schema)  # first: it bounds the depth, so the rest cannot run out of stack
    try:
        value = json.dumps(schema, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"schema must be JSON: {error}") from error
    return GrammarSpec(kind="json_schema", value=value, is_strict=is_strict)


def _read(text: str) -> GrammarSpec:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"must be at most {MAX_GRAMMAR_BYTES} bytes, got {len(text)}")
    content = _object("text", text)
    value, strict = content.get("value", ""), content.get("strict", True)
    if unknown := content.keys() - {"kind", "value", "strict"}:
        raise ValueError(f"fields must be kind, value and strict, got {sorted(unknown)}")
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be true or false, got {strict!r}")
    choices: tuple[str, ...] = ()
    if isinstance(value, list):
        choices, value = tuple(value), ""
    if not all(isinstance(one, str) for one in (content.get("kind"), value, *choices)):
        raise ValueError(f"kind must be a text and value a text or a list of texts, got {text[:80]!r}")
    return GrammarSpec(kind=content["kind"], value=value, choices=choices, is_strict=strict)


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field} must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{field} must be a JSON object, got {text[:80]!r}")
    return value


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"value must be valid Unicode: {error}") from error


def _expected(is_set: bool) -> str:
    return "set" if is_set else "empty"
