"""Which parser takes a model's answers apart: by the name users know from vLLM, or by the chat template.

Owns the names and the signs by which a template betrays its format. Must never know requests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.text.parsers.parts import Parser
from router.text.parsers.reasoning import ReasoningParser
from router.text.parsers.tool_calls import HermesCalls, Llama3Calls, MistralCalls, PlainText

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """`signs`: what all must stand in a template of this format, and `no_signs` what must not.
    `markers`: what the parser must see, though it may be special tokens, which have no text otherwise."""

    make: Callable[[], Parser]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    no_signs: tuple[str, ...] = ()
    has_short_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """`starts_open`: answers begin inside the reasoning whatever the prompt ends with."""

    opening: str
    closing: str
    starts_open: bool = False


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat(
            make=HermesCalls,
            markers=(HermesCalls.OPENING, HermesCalls.CLOSING),
            signs=(HermesCalls.OPENING, "arguments"),
            no_signs=("<function=", "<arg_key>"),
        ),
        "mistral": ToolFormat(
            make=MistralCalls,
            markers=(MistralCalls.MARKER, "[ARGS]", "[CALL_ID]"),
            signs=(MistralCalls.MARKER,),
            has_short_ids=True,
        ),
        "llama3_json": ToolFormat(
            make=Llama3Calls,
            markers=(Llama3Calls.MARKER,),
            signs=("ipython", '"parameters": '),
            no_signs=(HermesCalls.OPENING,),
        ),
    }
)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": ReasoningFormat(opening="<think>", closing="</think>"),
        "deepseek_r1": ReasoningFormat(opening="<think>", closing="</think>", starts_open=True),
        "mistral": ReasoningFormat(opening="[THINK]", closing="[/THINK]"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How one model writes tool calls and reasoning; None where it has no format for them."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def markers(self, *, has_tools: bool) -> frozenset[str]:
        """What the parser of an answer looks for."""
        markers: set[str] = set()
        if has_tools and self.tools is not None:
            markers.update(self.tools.markers)
        if self.reasoning is not None:
            markers.update((self.reasoning.opening, self.reasoning.closing))
        return frozenset(markers)

    def call_id(self, unique: str) -> str:
        """The id of a call, from 32 letters and digits; Mistral's templates insist on nine."""
        is_short = self.tools is not None and self.tools.has_short_ids
        return unique[-9:] if is_short else f"call_{unique[-24:]}"

    def parser(self, *, prompt_end: str, calls: Parser | None = None) -> Parser:
        """A fresh parser for one answer. `calls` None: no tools may be called. `prompt_end`: the last
        characters of the prompt, which may have opened the reasoning."""
        then = calls or PlainText()
        if self.reasoning is None:
            return then
        opening, closing = self.reasoning.opening, self.reasoning.closing
        is_open = self.reasoning.starts_open or prompt_end.rstrip().endswith(opening)
        return ReasoningParser(opening=opening, closing=closing, is_open=is_open, then=then)


PLAIN = AnswerFormat()


def answer_format(*, tool_parser: str, reasoning_parser: str, template: str) -> AnswerFormat:
    """The formats of these names; `auto` reads them off the chat template ("" without one).

    Raises ValueError naming the setting.
    """
    return AnswerFormat(tools=_tools(tool_parser, template), reasoning=_reasoning(reasoning_parser, template))


def check_names(*, tool_parser: str, reasoning_parser: str) -> None:
    """Raises ValueError naming the setting."""
    for setting, name, known in (
        ("tool_call_parser", tool_parser, TOOL_FORMATS),
        ("reasoning_parser", reasoning_parser, REASONING_FORMATS),
    ):
        if name not in (AUTO, NONE, *known):
            raise ValueError(
                f"{setting} must be one of {', '.join((AUTO, NONE, *sorted(known)))}, got {name!r}"
            )


def _tools(name: str, template: str) -> ToolFormat | None:
    if name != AUTO:
        return TOOL_FORMATS.get(name)
    return next(
        (
            known
            for known in TOOL_FORMATS.values()
            if all(sign in template for sign in known.signs)
            and not any(sign in template for sign in known.no_signs)
        ),
        None,
    )


def _reasoning(name: str, template: str) -> ReasoningFormat | None:
    if name != AUTO:
        return REASONING_FORMATS.get(name)
    return next((known for known in REASONING_FORMATS.values() if known.closing in template), None)
