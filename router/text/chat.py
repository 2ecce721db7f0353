"""Renders chat messages with the model's own template, as transformers' `apply_chat_template` does.

Owns the sandbox a template runs in: it came with the model's files and may do nothing but make text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.options import OPEN_ANSWER, TemplateOptions
from router.text.tokenizer import read_json

_WRONG = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template may raise that was given something it was not written for."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class TemplateFailed(ValueError):
    """The template raised an exception, or could not cope with these messages."""


class ChatTemplate:
    """One compiled template; read-only, safe to share between threads."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], local_time: Callable[[], datetime]
    ) -> None:
        self.source = source
        self._template = _environment(local_time).from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(
        cls, folder: Path, *, special_tokens: Mapping[str, str], local_time: Callable[[], datetime]
    ) -> "ChatTemplate | None":
        """The template of a model folder, None when it has none."""
        source = _find_source(folder)
        if source is None:
            return None
        return cls(source, special_tokens=special_tokens, local_time=local_time)

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = OPEN_ANSWER) -> str:
        """The prompt, open for the assistant unless `options` say otherwise.

        Raises TemplateFailed; ValueError on a reserved variable.
        """
        if reserved := sorted(_RESERVED & options.variables.keys()):
            raise ValueError(f"chat_template_kwargs must not set {reserved[0]!r}")
        variables = {**self._special_tokens, **options.variables}
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text = self._template.render(
                messages=shown,
                tools=list(options.tools) or None,
                documents=None,
                add_generation_prompt=options.opens_answer,
                **variables,
            )
        except _WRONG as error:
            raise TemplateFailed(f"the chat template refused the messages: {error}") from error
        return _up_to_last(text, str(shown[-1].get("content", ""))) if options.continues_last else text


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only lets them through."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _up_to_last(text: str, content: str) -> str:
    """The prompt up to the end of its last message, which the template may have stripped."""
    start = text.rfind(content.strip())
    if start < 0:
        raise TemplateFailed("the chat template does not show the last message, so it cannot be continued")
    for words in (content.lstrip(), content.strip()):
        if text.startswith(words, start):
            return text[: start + len(words)]
    raise AssertionError("one of the two was found")


def _environment(local_time: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def strftime_now(layout: str) -> str:
        return local_time().strftime(layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which a prompt must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _find_source(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        source = read_json(folder / name).get("chat_template")
        if isinstance(source, list):
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if isinstance(source, str):
            return source
    return None
