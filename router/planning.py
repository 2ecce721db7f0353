"""From what a user asked to what the dispatcher runs: defaults, limits and the model's own facts.

Owns the rules both front ends share. Must never know HTTP, gRPC or JSON.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router.errors import BadRequest, ContextTooLong, NoReadyPair
from router.requests import Constraint, GenerateRequest, SamplingParams
from router.text.options import PromptOptions
from router.text.stops import MAX_STOP_CHARS, MAX_STOPS

_SEED_RANGE = 2**64
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the router must know of the served model; the nodes' word where they gave it.

    `node_model` is the name nodes go by, "" when any will do. `max_model_len` 0: not known yet.
    """

    name: str
    node_model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The user's wishes; None means not given. `max_tokens_field` is what the user called max_tokens.

    `max_tokens` 0 asks for nothing but the prompt, which makes sense only where `may_be_empty` says so.
    `shows_stop`: the answer ends with the stop that ended it. `shows_special`: special tokens have text.
    `banned_sequences`: what `bad_words` are in tokens, once they are known.
    """

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    may_be_empty: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    shows_special: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What goes along with a request but does not change its tokens. `deadline_s` None: the router's own."""

    name: str = ""
    priority: int = 0
    cache_salt: str = ""
    trace_context: str = ""
    tenant: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One generation, ready to run: the tokens for the nodes, and the rules for text that stay here.

    `is_empty`: the nodes cannot draw nothing, so they draw one token, which is thrown away.
    """

    request: GenerateRequest
    stops: tuple[str, ...]
    shows_stop: bool = False
    shows_special: bool = False
    is_empty: bool = False


class Planner:
    """Turns token ids and options into plans. Every plan is within the model's limits."""

    def __init__(self, *, mint_seed: Callable[[], int]) -> None:
        self._mint_seed = mint_seed

    def plan(
        self,
        prompt_ids: tuple[int, ...],
        options: SamplingOptions,
        *,
        facts: ModelFacts,
        label: Label,
        choice: int = 0,
        param: str = "prompt",
    ) -> Plan:
        """A plan for choice number `choice` of a prompt; `param` names the prompt's field in errors.

        With a seed, choice i draws with seed + i (modulo 2**64), so choice 0 equals a single request.
        Raises BadRequest naming field and value.
        """
        if not prompt_ids:
            raise BadRequest(f"{param} must hold at least one token, got an empty prompt", param=param)
        max_tokens = _max_tokens(len(prompt_ids), options, facts, param=param)
        if choice == 0:  # the others have the same prompt, and it may be long
            check_token_ids(prompt_ids, facts, param=param)
        _check_ids(options, facts)
        _check_stops(options)
        seed = self._mint_seed() if options.seed is None else options.seed + choice
        sampling = _sampling(
            options,
            seed=seed % _SEED_RANGE,
            max_tokens=max(1, max_tokens),
            eos_token_ids=facts.eos_token_ids,
        )
        request = GenerateRequest(
            prompt_ids=prompt_ids,
            sampling=sampling,
            model=facts.node_model,
            label=label.name,
            priority=label.priority,
            cache_salt=label.cache_salt,
            trace_context=label.trace_context,
            constraint=options.constraint,
            tenant=label.tenant,
            deadline_s=label.deadline_s,
        )
        return Plan(
            request=request,
            stops=tuple(dict.fromkeys(options.stop)),
            shows_stop=options.shows_stop,
            shows_special=options.shows_special,
            is_empty=max_tokens == 0,
        )


def cut(
    prompt_ids: tuple[int, ...], options: PromptOptions, facts: ModelFacts, *, max_tokens: int | None
) -> tuple[int, ...]:
    """The last tokens of a prompt, where only so many are wanted."""
    num_kept = options.keeps_last
    if num_kept is None:
        return prompt_ids
    if num_kept < 0:
        num_kept = max(1, facts.max_model_len - max(1, max_tokens or 1))
    return prompt_ids[-num_kept:]


def check_token_ids(ids: tuple[int, ...], facts: ModelFacts, *, param: str) -> None:
    """Raises BadRequest naming an id that the model does not have."""
    if ids and (max(ids) >= facts.vocab_size or min(ids) < 0):
        bad = next(i for i in ids if not 0 <= i < facts.vocab_size)
        raise BadRequest(f"{param} must hold token ids in [0, {facts.vocab_size}), got {bad}", param=param)


def _check_ids(options: SamplingOptions, facts: ModelFacts) -> None:
    for token_id, _ in options.logit_bias:
        if not 0 <= token_id < facts.vocab_size:
            raise BadRequest(
                f"logit_bias must name token ids in [0, {facts.vocab_size}), got {token_id}",
                param="logit_bias",
            )
    check_token_ids(options.allowed_token_ids, facts, param="allowed_token_ids")
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(options.stop_token_ids)}",
            param="stop_token_ids",
        )
    for token_id in options.stop_token_ids:
        if not 0 <= token_id < facts.vocab_size:
            raise BadRequest(
                f"stop_token_ids must lie in [0, {facts.vocab_size}), got {token_id}", param="stop_token_ids"
            )


def _check_stops(options: SamplingOptions) -> None:
    if len(options.stop) > MAX_STOPS:
        raise BadRequest(f"stop must hold at most {MAX_STOPS} strings, got {len(options.stop)}", param="stop")
    for stop in options.stop:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise BadRequest(
                f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters, got one of {len(stop)}",
                param="stop",
            )


def check_bad_words(words: tuple[str, ...]) -> None:
    """Raises BadRequest."""
    if len(words) > MAX_BAD_WORDS:
        raise BadRequest(
            f"bad_words must hold at most {MAX_BAD_WORDS} strings, got {len(words)}", param="bad_words"
        )
    for word in words:
        if not word.strip() or len(word) > MAX_STOP_CHARS:
            raise BadRequest(
                f"bad_words must hold strings of 1 to {MAX_STOP_CHARS} characters, not only blanks,"
                f" got one of {len(word)}",
                param="bad_words",
            )


def _max_tokens(num_prompt: int, options: SamplingOptions, facts: ModelFacts, *, param: str) -> int:
    """The user's cap, else all the room the model has left."""
    limit = facts.max_model_len
    if limit <= 0:
        raise NoReadyPair("no node has told the model's limits yet", retry_after_s=1.0)
    if num_prompt >= limit:
        raise ContextTooLong(
            f"{param} has {num_prompt} tokens, but this model takes at most {limit} tokens "
            f"of prompt and completion together",
            param=param,
        )
    if options.max_tokens is None:
        return limit - num_prompt
    if options.max_tokens == 0 and not options.may_be_empty:
        field = options.max_tokens_field
        raise BadRequest(f"{field} must be at least 1, got 0", param=field)
    if num_prompt + options.max_tokens > limit:
        raise ContextTooLong(
            f"{options.max_tokens_field} must be at most {limit - num_prompt}, got {options.max_tokens}: "
            f"{param} has {num_prompt} tokens and this model takes at most {limit} of prompt and completion "
            f"together",
            param=options.max_tokens_field,
        )
    return options.max_tokens


def _sampling(
    options: SamplingOptions, *, seed: int, max_tokens: int, eos_token_ids: tuple[int, ...]
) -> SamplingParams:
    # A finished grammar leaves nothing else to draw, so it ends the answer even then.
    eos = () if options.ignore_eos and options.constraint is None else eos_token_ids
    given = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "repetition_penalty": options.repetition_penalty,
    }
    try:
        return SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            top_k=options.top_k or 0,
            min_tokens=options.min_tokens or 0,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            stop_token_ids=tuple(dict.fromkeys((*options.stop_token_ids, *eos))),
            logit_bias=options.logit_bias,
            allowed_token_ids=options.allowed_token_ids,
            banned_sequences=options.banned_sequences,
            **{name: value for name, value in given.items() if value is not None},
        )
    except ValueError as error:
        raise _named(error, options) from error


def _named(error: ValueError, options: SamplingOptions) -> BadRequest:
    """SamplingParams begins every message with the field; the user may know max_tokens by another name."""
    field, _, rest = str(error).partition(" ")
    if field == "max_tokens":
        field = options.max_tokens_field
    return BadRequest(f"{field} {rest}", param=field.partition("[")[0])
