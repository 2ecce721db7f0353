"""Log-probabilities as the two endpoints show them. Knows how a token looks, not why it was drawn.

Entries are encoded one by one: a long answer or prompt of them would hold the interpreter lock while it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.requests import TokenLogprob
from router.text.tokenizer import Tokenizer

Json = dict[str, Any]

SIZE = 16
"""What it takes to show one token and its log-probability, in the units of router.aside."""

_LOWEST = -9999.0
"""JSON has no minus infinity; this is what OpenAI sends in its place."""


def chat_content(
    ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, tokenizer: Tokenizer, num_top: int
) -> list[msgspec.Raw]:
    """`choices[].logprobs.content`: one entry a token, with its `num_top` rivals."""
    return [
        _encoded(
            {
                **_entry(token_id, logprob.logprob, tokenizer),
                "top_logprobs": [_entry(other, value, tokenizer) for other, value in logprob.top[:num_top]],
            }
        )
        for token_id, logprob in zip(ids, logprobs, strict=True)
    ]


def prompt_entries(
    ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, tokenizer: Tokenizer, num_top: int
) -> list[msgspec.Raw | None]:
    """vLLM's `prompt_logprobs`: for each token of a prompt, token id to how likely it was there; the first
    has none. `rank` is null for a token that is not among the likeliest."""
    entries: list[msgspec.Raw | None] = [None]
    for token_id, logprob in zip(ids[1:], logprobs, strict=True):
        shown: dict[int, tuple[float, int | None]] = {
            other: (value, rank) for rank, (other, value) in enumerate(logprob.top[:num_top], start=1)
        }
        shown.setdefault(token_id, (logprob.logprob, None))
        entry = {
            str(other): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": tokenizer.token_text(other),
            }
            for other, (value, rank) in shown.items()
        }
        entries.append(_encoded(entry))
    return entries


def joined_blocks(first: Json, second: Json) -> Json:
    """Two blocks of one choice as one."""
    return {name: [*first[name], *second[name]] for name in first}


class CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions; counts the text offset through the chunks of one choice."""

    def __init__(self, *, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def block(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Json:
        """The next tokens; the first of an echoed prompt has no log-probability.

        `top_logprobs` holds the chosen token too, so up to one more than asked.
        """
        tokens = [self._tokenizer.token_text(token_id) for token_id in ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [logprob and _finite(logprob.logprob) for logprob in logprobs],
            "top_logprobs": [
                logprob and self._top(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: str, logprob: TokenLogprob) -> msgspec.Raw:
        top: dict[str, float] = {}
        for other, value in logprob.top[: self._num_top]:
            top.setdefault(self._tokenizer.token_text(other), _finite(value))
        top.setdefault(token, _finite(logprob.logprob))
        return _encoded(top)


def _encoded(entry: Mapping[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(entry))


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
