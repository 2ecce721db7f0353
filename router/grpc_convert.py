"""Protobuf messages of `Generation` to the router's plain values and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from router.errors import BadRequest
from router.generation import Ended, TextDelta
from router.openai.grammar import read_option
from router.openai.messages import Message, read_messages
from router.openai.requests import checked_keeps_last, template_options
from router.openai.tables import MAX_CHOICES
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
        stop=tuple(dict.fromkeys(sampling.stop)),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        allowed_token_ids=tuple(dict.fromkeys(sampling.allowed_token_ids)),
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
    return read_messages([{"role": message.role, "content": message.content} for message in chat.messages])


def unpack_template(chat: generate_pb2.ChatMessages) -> TemplateOptions:
    """Under the same rules as HTTP's. Raises BadRequest."""
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    return template_options(
        opens=opens,
        continues=chat.continue_final_message,
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


def pack_delta(delta: TextDelta, *, label: str, index: int) -> generate_pb2.GenerateResponse:
    return generate_pb2.GenerateResponse(
        request_id=label,
        index=index,
        text=delta.text,
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


def pack_end(
    end: Ended, *, label: str, index: int, num_prompt_tokens: int, all_ends: Sequence[Ended]
) -> generate_pb2.GenerateResponse:
    """The last message of a choice. `all_ends`: of every choice when this is the last of all, else empty."""
    ended = generate_pb2.GenerateResponse(request_id=label, index=index, finish_reason=end.reason)
    if all_ends:
        outcomes = [one.outcome for one in all_ends if one.outcome is not None]
        ended.usage.prompt_tokens = num_prompt_tokens
        ended.usage.completion_tokens = sum(one.num_tokens for one in all_ends)
        ended.usage.cached_tokens = outcomes[0].cached_tokens if outcomes else 0
        ended.speculation.num_steps = sum(one.speculation.num_steps for one in all_ends)
        ended.speculation.num_drafted = sum(one.speculation.num_drafted for one in all_ends)
        ended.speculation.num_accepted = sum(one.speculation.num_accepted for one in all_ends)
    return ended


def _as_written(value: float) -> float:
    """The wire has single precision: 0.7 arrives as 0.699999988, which could draw other tokens."""
    return float(f"{value:.7g}")
