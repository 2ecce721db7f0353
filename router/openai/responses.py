"""What a client asked of /v1/responses, as plain values. Nothing is kept, so every request brings all of it.

Owns the shape of the request. Must never know the model's limits (planning) or the answer (response_shapes).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import BadRequest
from router.openai.fields import Fields, refuse
from router.openai.grammar import read_format, shown_format
from router.openai.messages import Message
from router.openai.requests import Wishes, read_prompt_options
from router.openai.response_input import read_input
from router.openai.sampling import read_sampling
from router.openai.tables import MAX_TOP_LOGPROBS, RESPONSES
from router.openai.tools import Tools, read_tools
from router.text.options import TemplateOptions

_WANTS_LOGPROBS = "message.output_text.logprobs"
_OF_OTHER_ITEMS = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""`include` values that concern what no answer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """`shown`: fields of the request that the answer repeats."""

    messages: tuple[Message, ...]
    template: TemplateOptions
    tools: Tools
    wishes: Wishes
    shown: Mapping[str, Any]


def read_response(body: Mapping[str, Any]) -> ResponseRequest:
    """Raises BadRequest naming the field."""
    fields = RESPONSES.fields(body)
    is_stream = fields.boolean("stream")
    if fields.raw("stream_options") is not None and not is_stream:
        raise BadRequest("stream_options must be left out unless stream is true", param="stream_options")
    _only("stream_options", fields.mapping("stream_options"), {"include_obfuscation": (False,)})
    text = fields.mapping("text")
    constraint = read_format("text.format", text.get("format"), nests_schema=False)
    _only("text", {**text, "format": None}, {"verbosity": ("medium",)})
    tools = read_tools(fields, is_flat=True)
    instructions = fields.text("instructions")
    system = () if instructions is None else ({"role": "system", "content": instructions},)
    wishes = Wishes(
        model=fields.text("model"),
        options=read_sampling(
            fields,
            logprobs=_logprobs(fields),
            max_tokens_names=("max_output_tokens",),
            constraint=constraint,
        ),
        text=read_prompt_options(fields),
        n=1,
        prompt_top=None,
        is_stream=is_stream,
        wants_usage=True,
        wants_token_ids=False,
        priority=fields.integer("priority", minimum=-(2**31), maximum=2**31 - 1) or 0,
        cache_salt=fields.text("cache_salt") or "",
    )
    return ResponseRequest(
        messages=(*system, *read_input(fields.raw("input"))),
        template=TemplateOptions(variables=fields.mapping("chat_template_kwargs"), tools=tools.definitions),
        tools=tools,
        wishes=wishes,
        shown={
            "instructions": instructions,
            "max_output_tokens": wishes.options.max_tokens,
            "metadata": fields.mapping("metadata"),
            "parallel_tool_calls": fields.boolean("parallel_tool_calls", default=True),
            "text": shown_format(text),
            "temperature": fields.number("temperature"),
            "tool_choice": fields.raw("tool_choice") or "auto",
            "tools": fields.raw("tools") or [],
            "top_p": fields.number("top_p"),
            "top_logprobs": fields.integer("top_logprobs") or 0,
            "user": body.get("user"),
        },
    )


def _only(name: str, given: Mapping[str, Any], taken: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse what an object asks for beyond what is done anyway."""
    for key, value in given.items():
        if value is not None and value not in taken.get(key, ()):
            raise BadRequest(
                f"{name}.{key} is not supported", param=f"{name}.{key}", code="unsupported_parameter"
            )


def _logprobs(fields: Fields) -> int | None:
    """`top_logprobs` says how many, `include` that they are to be shown at all; either will do."""
    top = fields.integer("top_logprobs", minimum=0, maximum=MAX_TOP_LOGPROBS)
    include = fields.raw("include") or []
    if not isinstance(include, list) or any(not isinstance(name, str) for name in include):
        raise refuse("include", "a list of strings", include)
    for name in include:
        if name != _WANTS_LOGPROBS and name not in _OF_OTHER_ITEMS:
            raise refuse("include", f"{_WANTS_LOGPROBS} or another value that OpenAI knows", name)
    return top or (0 if _WANTS_LOGPROBS in include else None)
