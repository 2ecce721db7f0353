"""Protobuf messages of `Generation` to the router's plain values and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from router.errors import BadRequest
from router.generation import Ended, TextDelta
from router.openai.chat_parts import ChatParts
from router.openai.fields import Fields
from router.openai.grammar import read_option
from router.openai.json_text import NoJson, decode_json
from router.openai.messages import Message, read_messages
from router.openai.requests import checked_keeps_last, template_options
from router.openai.tables import MAX_CHOICES
from router.openai.tools import Tools, read_tools
from router.planning import SamplingOptions
from router.requests import Constraint, TokenLogprob
from router.text.options import PromptOptions, TemplateOptions
from wire.gen import generate_pb2

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_GRAMMARS: Mapping[str, Callable[[generate_pb2.Grammar], tuple[str, Any]]] = {
    "json_schema": lambda grammar: ("json", grammar.json_schema.schema),
    "json_object": lambda grammar: ("json_object", grammar.json_object),
    "regex": lambda grammar: ("regex", grammar.regex),
    "ebnf": lambda grammar: ("grammar", grammar.ebnf),
    "choice": lambda grammar: ("choice", list(grammar.choice.texts)),
}
"""How the fields of HTTP have it: the option's name and value."""

_INTEGERS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")


def unpack_sampling(sampling: generate_pb2.Sampling) -> SamplingOptions:
    """Absent fields stay None, so the defaults are those of HTTP."""
    present = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    given: dict[str, Any] = {name: present[name] for name in _INTEGERS if name in present}
    given |= {name: _as_written(present[name]) for name in _FLOATS if name in present}
    return SamplingOptions(
        **given,
        may_be_empty="prompt_logprobs" in present,
        shows_stop=sampling.include_stop_str_in_output,
        shows_special=not present.get("skip_special_tokens", True),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        allowed_token_ids=tuple(dict.fromkeys(sampling.allowed_token_ids)),
        bad_words=tuple(sampling.bad_words),
        logit_bias=tuple((token_id, _as_written(bias)) for token_id, bias in sampling.logit_bias.items()),
    )


def unpack_grammar(grammar: generate_pb2.Grammar) -> Constraint | None:
    """Under the same rules as HTTP's fields. Raises BadRequest."""
    kind = grammar.WhichOneof("kind")
    if kind is None:
        return None
    option, value = _GRAMMARS[kind](grammar)
    return read_option(f"grammar.{kind}", option, value, is_strict=grammar.json_schema.strict)


def unpack_messages(chat: generate_pb2.ChatMessages) -> tuple[Message, ...]:
    """Under the same rules as HTTP's messages. Raises BadRequest."""
    return read_messages([_message(message) for message in chat.messages])


def _message(message: generate_pb2.ChatMessage) -> dict[str, Any]:
    """As HTTP has it."""
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content if message.HasField("content") or not calls else None,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id or None,
        "reasoning_content": message.reasoning or None,
    }


def unpack_tools(chat: generate_pb2.ChatMessages) -> Tools:
    """Under the same rules as HTTP's. Raises BadRequest."""
    choice: Any = chat.tool_choice or None
    if choice == "named":
        choice = {"type": "function", "function": {"name": chat.named_tool}}
    is_parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
    values = {
        "tools": [_tool(index, tool) for index, tool in enumerate(chat.tools)],
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
    }
    return read_tools(Fields(values, known=values))


def _tool(index: int, tool: generate_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters:
        try:
            function["parameters"] = decode_json(tool.parameters)
        except NoJson as error:
            field = f"tools[{index}].parameters"
            raise BadRequest(f"{field} must be a JSON schema: {error}", param=field) from error
    return {"type": "function", "function": function}


def unpack_template(chat: generate_pb2.ChatMessages, tools: Tools) -> TemplateOptions:
    """Under the same rules as HTTP's. Raises BadRequest."""
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    return template_options(
        opens=opens,
        continues=chat.continue_final_message,
        tools=tools,
        variables=json_format.MessageToDict(chat.template_variables),
    )


def unpack_prompt_options(request: generate_pb2.GenerateRequest) -> PromptOptions:
    """Raises BadRequest."""
    return PromptOptions(
        adds_special=request.add_special_tokens if request.HasField("add_special_tokens") else None,
        keeps_last=checked_keeps_last(
            request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
        ),
    )


def unpack_n(request: generate_pb2.GenerateRequest) -> int:
    """Raises BadRequest."""
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"n must be in [1, {MAX_CHOICES}], got {n}", param="n")
    return n


def pack_delta(
    delta: TextDelta, *, label: str, index: int, parts: ChatParts | None
) -> generate_pb2.GenerateResponse:
    """`parts` reads the answer to a chat; None for other inputs."""
    shown = {"text": delta.text} if parts is None else _pack_parts(parts.push(delta.text))
    return generate_pb2.GenerateResponse(
        request_id=label,
        index=index,
        **shown,
        token_ids=delta.ids,
        logprobs=map(_pack_logprob, delta.logprobs or ()),
        prompt_logprobs=map(_pack_logprob, delta.prompt_logprobs or ()),
        accepted_draft_tokens=delta.accepted,
    )


def _pack_logprob(entry: TokenLogprob) -> generate_pb2.TokenLogprob:
    return generate_pb2.TokenLogprob(
        logprob=entry.logprob,
        top_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[value for _, value in entry.top],
    )


def _pack_parts(delta: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        generate_pb2.ToolCall(
            index=call["index"],
            id=call.get("id", ""),
            name=call["function"].get("name", ""),
            arguments=call["function"]["arguments"],
        )
        for call in delta.get("tool_calls", ())
    ]
    return {
        "text": delta.get("content", ""),
        "reasoning": delta.get("reasoning_content", ""),
        "tool_calls": calls,
    }


def pack_end(end: Ended, *, label: str, index: int, parts: ChatParts | None) -> generate_pb2.GenerateResponse:
    """The last message of a choice, with what its parser still held back."""
    shown: dict[str, Any] = {} if parts is None else _pack_parts(parts.finish())
    reason = end.reason if parts is None else parts.finish_reason(end.reason)
    return generate_pb2.GenerateResponse(request_id=label, index=index, finish_reason=reason, **shown)


def add_totals(
    ended: generate_pb2.GenerateResponse, all_ends: Sequence[Ended], *, num_prompt_tokens: int
) -> None:
    """What the very last message says of all choices."""
    outcomes = [one.outcome for one in all_ends if one.outcome is not None]
    ended.usage.prompt_tokens = num_prompt_tokens
    ended.usage.completion_tokens = sum(one.num_tokens for one in all_ends)
    ended.usage.cached_tokens = outcomes[0].cached_tokens if outcomes else 0
    ended.speculation.num_steps = sum(one.speculation.num_steps for one in all_ends)
    ended.speculation.num_drafted = sum(one.speculation.num_drafted for one in all_ends)
    ended.speculation.num_accepted = sum(one.speculation.num_accepted for one in all_ends)


def _as_written(value: float) -> float:
    """The wire has single precision: 0.7 arrives as 0.699999988, which could draw other tokens."""
    return float(f"{value:.7g}")
