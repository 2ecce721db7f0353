"""Sampling parameters of one request: plain values, no torch, so that the router may build them.

Owns the names, defaults and ranges. Must never know how a token is drawn.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn. Every instance is valid: bad values raise ValueError.

    temperature 0 means greedy. top_k 0 means off. `logprobs` None means none wanted, 0 the chosen
    token's only, n > 0 also the n most likely; `prompt_logprobs` asks the same of the prompt's own tokens,
    all but the first. `stop_token_ids` already contains the model's
    end-of-sequence ids unless the user asked to ignore them; until `min_tokens` outputs exist they
    cannot be drawn. `allowed_token_ids` () allows every token. No answer contains one of
    `banned_sequences`, none of which is empty. `seed` is always set: the router mints one
    where the user gave none.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "in [0, 2]")
        _require("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]")
        _require("top_k", self.top_k, 0 <= self.top_k < 2**32, "0 (off) or positive, and below 2**32")
        _require("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        _require("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 2.0, "in [-2, 2]")
        _require(
            "frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= 2.0, "in [-2, 2]"
        )
        _require(
            "repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 2.0, "in (0, 2]"
        )
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require(
            "min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"
        )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(name, count, count is None or 0 <= count <= 20, "in [0, 20]")
        _require("seed", self.seed, 0 <= self.seed < 2**64, "an unsigned 64-bit integer")
        for token_id, bias in self.logit_bias:
            _require(f"logit_bias[{token_id}]", bias, token_id >= 0 and abs(bias) <= 100.0, "in [-100, 100]")

        _require("banned_sequences", self.banned_sequences, all(self.banned_sequences), "none of them empty")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token, and of the most likely ones (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _require(field: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{field} must be {rule}, got {value!r}")
