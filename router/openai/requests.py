"""What a client asked for: the bodies of /v1/completions and /v1/chat/completions as plain values.

Owns the shape of requests. Must never know the model's limits (planning) or the answer (shapes).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import BadRequest
from router.openai.fields import Fields, refuse
from router.openai.grammar import read_constraint
from router.openai.messages import Message, read_messages
from router.openai.sampling import chat_logprobs, completion_logprobs, prompt_logprobs, read_sampling
from router.openai.tables import CHAT, COMPLETIONS, MAX_CHOICES
from router.openai.tools import NO_TOOLS, Tools, read_tools
from router.planning import SamplingOptions
from router.text.options import PromptOptions, TemplateOptions

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What both endpoints share. `model` None takes whatever is served.

    `prompt_top`: how many of the likeliest the prompt's own tokens are shown beside, None to show nothing.
    """

    model: str | None
    options: SamplingOptions
    text: PromptOptions
    n: int
    prompt_top: int | None
    is_stream: bool
    wants_usage: bool
    wants_token_ids: bool
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """`is_list` says whether errors may name one prompt of several. `echoes`: answers begin with theirs."""

    prompts: tuple[Prompt, ...]
    is_list: bool
    echoes: bool
    wishes: Wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: tuple[Message, ...]
    template: TemplateOptions
    tools: Tools
    wishes: Wishes


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises BadRequest naming the field."""
    fields = COMPLETIONS.fields(body)
    prompts, is_list = _prompts(fields.raw("prompt"))
    echoes, logprobs = fields.boolean("echo"), completion_logprobs(fields)
    wishes = _wishes(fields, logprobs=logprobs, echo_top=logprobs if echoes else None, may_be_empty=echoes)
    _check_best_of(fields, wishes.n)
    if len(prompts) * wishes.n > MAX_CHOICES:
        raise BadRequest(
            f"prompt and n must ask for at most {MAX_CHOICES} choices in all, "
            f"got {len(prompts)} prompts times {wishes.n}",
            param="n",
        )
    return CompletionRequest(prompts=prompts, is_list=is_list, echoes=echoes, wishes=wishes)


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises BadRequest naming the field."""
    fields = CHAT.fields(body)
    messages = read_messages(fields.raw("messages"))
    wishes = _wishes(fields, logprobs=chat_logprobs(fields))
    tools = read_tools(fields)
    return ChatRequest(messages=messages, template=read_template(fields, tools), tools=tools, wishes=wishes)


def read_template(fields: Fields, tools: Tools = NO_TOOLS) -> TemplateOptions:
    """Raises BadRequest naming the field."""
    return template_options(
        opens=fields.boolean_or_none("add_generation_prompt"),
        continues=fields.boolean("continue_final_message"),
        variables=fields.mapping("chat_template_kwargs"),
        tools=tools,
    )


def template_options(
    *, opens: bool | None, continues: bool, variables: Mapping[str, Any], tools: Tools = NO_TOOLS
) -> TemplateOptions:
    """Raises BadRequest when an answer is to be opened and the last message to be continued."""
    if continues and opens:
        raise refuse("continue_final_message", "false when add_generation_prompt is true", True)
    return TemplateOptions(
        opens_answer=not continues if opens is None else opens,
        continues_last=continues,
        tools=tools.definitions,
        variables=variables,
    )


def _check_best_of(fields: Fields, n: int) -> None:
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != n:
        raise BadRequest(
            f"best_of must equal n, which is {n}, got {best_of}",
            param="best_of",
            code="unsupported_parameter",
        )


def _wishes(
    fields: Fields, *, logprobs: int | None, echo_top: int | None = None, may_be_empty: bool = False
) -> Wishes:
    is_stream = fields.boolean("stream")
    prompt_top = prompt_logprobs(fields)
    scored = max((top for top in (prompt_top, echo_top) if top is not None), default=None)
    options = read_sampling(
        fields,
        logprobs=logprobs,
        prompt_logprobs=scored,
        may_be_empty=may_be_empty,
        constraint=read_constraint(fields),
    )
    return Wishes(
        model=fields.text("model"),
        options=options,
        text=read_prompt_options(fields),
        prompt_top=prompt_top,
        n=fields.integer("n", minimum=1, maximum=MAX_CHOICES) or 1,
        is_stream=is_stream,
        wants_usage=_wants_usage(fields, is_stream=is_stream),
        wants_token_ids=fields.boolean("return_token_ids"),
        priority=fields.integer("priority", minimum=-(2**31), maximum=2**31 - 1) or 0,
        cache_salt=fields.text("cache_salt") or "",
    )


def _wants_usage(fields: Fields, *, is_stream: bool) -> bool:
    where = "stream_options"
    if fields.raw(where) is not None and not is_stream:
        raise BadRequest(f"{where} must be left out unless stream is true", param=where)
    options = Fields(fields.mapping(where), known=("include_usage", "include_obfuscation"))
    if options.boolean("include_obfuscation"):
        field = f"{where}.include_obfuscation"
        raise BadRequest(f"{field} is not supported", param=field, code="unsupported_parameter")
    return options.boolean("include_usage")


def read_prompt_options(fields: Fields) -> PromptOptions:
    """Raises BadRequest naming the field."""
    return PromptOptions(
        adds_special=fields.boolean_or_none("add_special_tokens"),
        keeps_last=checked_keeps_last(fields.integer("truncate_prompt_tokens")),
    )


def checked_keeps_last(count: int | None) -> int | None:
    """Raises BadRequest for a number of tokens that a prompt cannot be cut to."""
    if count is not None and count < 1 and count != -1:
        raise refuse("truncate_prompt_tokens", "positive, or -1 for as many as the model takes", count)
    return count


def _prompts(value: Any) -> tuple[tuple[Prompt, ...], bool]:
    """A string, a list of strings, token ids, or a list of token-id lists."""
    if isinstance(value, str | tuple):  # a tuple holds integers only
        return (value,), False
    if not isinstance(value, list) or not value:
        raise refuse("prompt", "a string, token ids, or a non-empty list of either", value)
    if set(map(type, value)) == {int}:  # many times as fast as looking at each
        return (tuple(value),), False
    if all(isinstance(item, str) for item in value):
        return tuple(value), True
    if type(value[0]) is int:
        index = next(index for index, item in enumerate(value) if type(item) is not int)
        raise refuse(f"prompt[{index}]", "a token id like the others", value[index])
    return tuple(_token_ids(index, item) for index, item in enumerate(value)), True


def _token_ids(index: int, value: Any) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return value
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise refuse(f"prompt[{index}]", "a list of token ids like the others", value)
    return tuple(value)
