"""The sampling fields of both endpoints, from JSON to `SamplingOptions`."""

from collections.abc import Sequence
from typing import Any

from router.openai.fields import Fields, as_number, refuse
from router.openai.tables import MAX_TOP_LOGPROBS, SEED_MAX, SEED_MIN
from router.planning import SamplingOptions
from router.requests import Constraint

_MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens")


def read_sampling(
    fields: Fields,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    may_be_empty: bool = False,
    max_tokens_names: Sequence[str] = _MAX_TOKENS_NAMES,
    constraint: Constraint | None = None,
) -> SamplingOptions:
    """Ranges that need no model are checked by SamplingParams, which names the field too.

    `max_tokens_names`: what the endpoint calls it; the first one given wins.
    """
    may_be_empty = may_be_empty or prompt_logprobs is not None
    max_tokens, max_tokens_field = _max_tokens(fields, max_tokens_names, minimum=0 if may_be_empty else 1)
    top_k = fields.integer("top_k", minimum=-1)
    return SamplingOptions(
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        may_be_empty=may_be_empty,
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=0 if top_k == -1 else top_k,
        min_p=fields.number("min_p"),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        repetition_penalty=fields.number("repetition_penalty"),
        seed=fields.integer("seed", minimum=SEED_MIN, maximum=SEED_MAX),
        min_tokens=fields.integer("min_tokens", minimum=0),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=_stop(fields.raw("stop")),
        shows_stop=fields.boolean("include_stop_str_in_output"),
        shows_special=not fields.boolean("skip_special_tokens", default=True),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos"),
        allowed_token_ids=_allowed(fields),
        bad_words=_bad_words(fields.raw("bad_words")),
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        constraint=constraint,
    )


def completion_logprobs(fields: Fields) -> int | None:
    """`logprobs` is a number there."""
    return fields.integer("logprobs", minimum=0, maximum=MAX_TOP_LOGPROBS)


def chat_logprobs(fields: Fields) -> int | None:
    """`logprobs` is a switch there, `top_logprobs` the number."""
    top = fields.integer("top_logprobs", minimum=0, maximum=MAX_TOP_LOGPROBS)
    if not fields.boolean("logprobs"):
        if top:
            raise refuse("top_logprobs", "left out unless logprobs is true", top)
        return None
    return top or 0


def prompt_logprobs(fields: Fields) -> int | None:
    """vLLM's field, on both endpoints."""
    count = fields.integer("prompt_logprobs", minimum=0, maximum=MAX_TOP_LOGPROBS)
    if count is not None and fields.boolean("stream"):
        raise refuse("prompt_logprobs", "left out when stream is true", count)
    return count


def _max_tokens(fields: Fields, names: Sequence[str], *, minimum: int) -> tuple[int | None, str]:
    for name in names:
        value = fields.integer(name, minimum=minimum)
        if value is not None:
            return value, name
    return None, names[-1]


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or any(not isinstance(stop, str) for stop in stops):
        raise refuse("stop", "a string or a list of strings", value)
    return tuple(stops)


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(not isinstance(word, str) for word in value):
        raise refuse("bad_words", "a list of strings", value)
    return tuple(value)


def _allowed(fields: Fields) -> tuple[int, ...]:
    ids = fields.integers("allowed_token_ids")
    if not ids and fields.raw("allowed_token_ids") is not None:
        raise refuse("allowed_token_ids", "left out or hold at least one token id", [])
    return tuple(dict.fromkeys(ids))


def _logit_bias(value: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 18:
            raise refuse("logit_bias", "an object whose keys are token ids", value)
        pairs.append((int(key), as_number("logit_bias", bias)))
    return tuple(pairs)
