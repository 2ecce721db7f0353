"""How a model writes tool calls and reasoning, applied to a chat: what to ask of the answer, how to read it.

Owns the choice of the parser. Both front ends share it. Must never know how parts are shown.
"""

from collections.abc import Callable
from dataclasses import replace

from router.errors import BadRequest
from router.openai.answer_parts import AnswerParts
from router.openai.chat_parts import ChatParts
from router.openai.tools import Tools
from router.planning import SamplingOptions
from router.text.parsers.catalogue import PLAIN, AnswerFormat
from router.text.parsers.parts import Parser
from router.text.parsers.tool_calls import JsonListCalls, NamedCall, PlainText
from router.text.tokenizer import Tokenizer

# Enough of the prompt's end to see whether it opens the reasoning.
_NUM_END_TOKENS = 8


class ChatFormat:
    """`new_id` makes ids of at least 32 letters and digits."""

    def __init__(
        self, tokenizer: Tokenizer, *, new_id: Callable[[], str], answer_format: AnswerFormat = PLAIN
    ) -> None:
        self._tokenizer = tokenizer
        self._new_id = new_id
        self._format = answer_format

    def options(self, options: SamplingOptions, tools: Tools) -> SamplingOptions:
        """With what parser and tools ask of the answer. Raises BadRequest where they cannot work."""
        if tools.choice == "auto" and self._format.tools is None:
            raise BadRequest(
                "tools cannot be used with tool_choice auto: the chat template of this model shows no known"
                " format of calls (the router's tool_call_parser sets one)",
                param="tools",
                code="unsupported_parameter",
            )
        if tools.is_forced:
            if options.constraint is not None and not options.constraint.is_for_words:
                raise BadRequest(
                    f"tool_choice must be none or auto: {options.constraint.field} already says what form the"
                    " answer has",
                    param="tool_choice",
                )
            options = replace(options, constraint=tools.constraint())
        return replace(options, shows_special=True) if self._has_special_markers(tools) else options

    def parts(self, tools: Tools, prompt_ids: tuple[int, ...], *, is_constrained: bool) -> ChatParts:
        """A reader of one answer to a chat."""
        return ChatParts(self.answer(tools, prompt_ids, is_constrained=is_constrained))

    def answer(self, tools: Tools, prompt_ids: tuple[int, ...], *, is_constrained: bool) -> AnswerParts:
        """A reader of one answer. A constraint holds from its first token on: there is no reasoning then."""
        calls = self._calls(tools)
        if not is_constrained:
            prompt_end = "".join(map(self._tokenizer.token_text, prompt_ids[-_NUM_END_TOKENS:]))
            parser = self._format.parser(prompt_end=prompt_end, calls=calls)
        else:
            parser = calls or PlainText()
        return AnswerParts(
            parser,
            new_call_id=lambda: self._format.call_id(self._new_id()),
            max_calls=None if tools.is_parallel else 1,
            is_free=tools.choice != "named",
        )

    def _calls(self, tools: Tools) -> Parser | None:
        match tools.choice:
            case "named":
                return NamedCall(tools.named)
            case "required":
                return JsonListCalls()
            case "auto":
                return self._format.tools.make() if self._format.tools else None
        return None

    def _has_special_markers(self, tools: Tools) -> bool:
        """Special tokens have no text, unless the parser needs to see them."""
        markers = self._format.markers(has_tools=tools.choice == "auto")
        return any(
            self._tokenizer.token_text(token_id) in markers for token_id in self._tokenizer.special_ids
        )
