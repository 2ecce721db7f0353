"""Protobuf messages of `Generation` to the router's plain values and back."""

from collections.abc import Callable, Mapping
from typing import Any

from router.generation import Ended, TextDelta
from router.openai.grammar import read_option
from router.openai.messages import Message, read_messages
from router.planning import SamplingOptions
from router.requests import Constraint
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

_INTEGERS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs")


def unpack_sampling(sampling: generate_pb2.Sampling) -> SamplingOptions:
    """Absent fields stay None, so the defaults are those of HTTP."""
    present = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    given: dict[str, Any] = {name: present[name] for name in _INTEGERS if name in present}
    given |= {name: _as_written(present[name]) for name in _FLOATS if name in present}
    return SamplingOptions(
        **given,
        stop=tuple(dict.fromkeys(sampling.stop)),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
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


def pack_delta(delta: TextDelta, *, label: str) -> generate_pb2.GenerateResponse:
    logprobs = [
        generate_pb2.TokenLogprob(
            logprob=entry.logprob,
            top_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[value for _, value in entry.top],
        )
        for entry in delta.logprobs or ()
    ]
    return generate_pb2.GenerateResponse(
        request_id=label,
        text=delta.text,
        token_ids=delta.ids,
        logprobs=logprobs,
        accepted_draft_tokens=delta.accepted,
    )


def pack_end(end: Ended, *, label: str, num_prompt_tokens: int) -> generate_pb2.GenerateResponse:
    """The last message."""
    return generate_pb2.GenerateResponse(
        request_id=label,
        finish_reason=end.reason,
        usage=generate_pb2.Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=end.num_tokens,
            cached_tokens=end.outcome.cached_tokens if end.outcome is not None else 0,
        ),
        speculation=generate_pb2.Speculation(
            num_steps=end.speculation.num_steps,
            num_drafted=end.speculation.num_drafted,
            num_accepted=end.speculation.num_accepted,
        ),
    )


def _as_written(value: float) -> float:
    """The wire has single precision: 0.7 arrives as 0.699999988, which could draw other tokens."""
    return float(f"{value:.7g}")
