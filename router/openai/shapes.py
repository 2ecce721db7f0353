"""The answers of both endpoints as JSON values: whole bodies and stream chunks.

Owns their form, which strict clients check. Must never know where tokens come from or how bytes are sent.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.generation import Ended, TextDelta
from router.openai.chat_parts import ChatParts
from router.openai.logprobs import CompletionLogprobs, chat_content, joined_blocks, prompt_entries
from router.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every chunk of one answer repeats. `num_top` None: no log-probabilities; `prompt_top` None: none
    of the prompt."""

    answer_id: str
    created: int
    model: str
    num_top: int | None = None
    prompt_top: int | None = None
    wants_token_ids: bool = False


class Shape(Protocol):
    """How one endpoint shows one choice."""

    def opening(self, first: TextDelta | None) -> Json | None:
        """The choice of the chunk before the first text, if there is one; `first` comes next."""
        ...

    def chunk(self, delta: TextDelta) -> Json:
        """The choice of a chunk."""
        ...

    def has_text(self, chunk: Json) -> bool:
        """Whether a chunk shows anything but ids and log-probabilities."""
        ...

    def closing(self, reason: str) -> Json:
        """The choice of the chunk that carries the finish reason."""
        ...

    def whole(self, delta: TextDelta, reason: str) -> Json:
        """The choice of a whole body."""
        ...

    def root(self, delta: TextDelta) -> Json:
        """What the first choice adds beside the choices of a whole body."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPrompt:
    """The prompt of a choice. `echo`: the text that answers begin with, None for answers that do not."""

    ids: tuple[int, ...]
    echo: str | None = None


class CompletionShape:
    """A choice of /v1/completions."""

    def __init__(self, index: int, envelope: Envelope, *, tokenizer: Tokenizer, prompt: ShownPrompt) -> None:
        self._index = index
        self._prompt = prompt
        self._prompt_top = envelope.prompt_top
        self._tokenizer = tokenizer
        self._wants_token_ids = envelope.wants_token_ids
        self._logprobs = (
            None
            if envelope.num_top is None
            else CompletionLogprobs(tokenizer=tokenizer, num_top=envelope.num_top)
        )

    def opening(self, first: TextDelta | None) -> Json | None:
        if self._prompt.echo is None:
            return None
        return {
            "index": self._index,
            "text": self._prompt.echo,
            "logprobs": self._echoed(first),
            "finish_reason": None,
        }

    def chunk(self, delta: TextDelta) -> Json:
        return self._choice(delta, None)

    def has_text(self, chunk: Json) -> bool:
        return bool(chunk["text"])

    def closing(self, reason: str) -> Json:
        return {"index": self._index, "text": "", "logprobs": None, "finish_reason": reason}

    def whole(self, delta: TextDelta, reason: str) -> Json:
        echoed = self.opening(delta)
        choice = self._choice(delta, reason)
        if echoed is not None:
            choice["text"] = echoed["text"] + choice["text"]
            blocks = [block for block in (echoed["logprobs"], choice["logprobs"]) if block]
            choice["logprobs"] = functools.reduce(joined_blocks, blocks) if blocks else None
        if self._prompt_top is not None:
            choice["prompt_logprobs"] = prompt_entries(
                self._prompt.ids,
                delta.prompt_logprobs or (),
                tokenizer=self._tokenizer,
                num_top=self._prompt_top,
            )
        return choice

    def root(self, delta: TextDelta) -> Json:  # noqa: ARG002  everything is in the choices
        return {}

    def _echoed(self, first: TextDelta | None) -> Json | None:
        if self._logprobs is None or first is None or first.prompt_logprobs is None:
            return None
        return self._logprobs.block(self._prompt.ids, (None, *first.prompt_logprobs))

    def _choice(self, delta: TextDelta, reason: str | None) -> Json:
        logprobs = None
        if self._logprobs is not None and delta.logprobs:
            logprobs = self._logprobs.block(delta.ids, delta.logprobs)
        choice = {"index": self._index, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}
        if self._wants_token_ids:
            choice["token_ids"] = delta.ids
        return choice


class ChatShape:
    """A choice of /v1/chat/completions."""

    def __init__(
        self, index: int, envelope: Envelope, *, tokenizer: Tokenizer, prompt: ShownPrompt, parts: ChatParts
    ) -> None:
        self._index = index
        self._parts = parts
        self._prompt = prompt
        self._num_top = envelope.num_top
        self._prompt_top = envelope.prompt_top
        self._wants_token_ids = envelope.wants_token_ids
        self._tokenizer = tokenizer

    def opening(self, first: TextDelta | None) -> Json | None:  # noqa: ARG002  no prompt is shown in a chat
        delta = {"role": "assistant", "content": ""}
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: TextDelta) -> Json:
        return self._with_ids(
            delta,
            {
                "index": self._index,
                "delta": self._parts.push(delta.text),
                "logprobs": self._logprobs(delta),
                "finish_reason": None,
            },
        )

    def has_text(self, chunk: Json) -> bool:
        return bool(chunk["delta"])

    def closing(self, reason: str) -> Json:
        delta = self._parts.finish()
        reason = self._parts.finish_reason(reason)
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def whole(self, delta: TextDelta, reason: str) -> Json:
        self._parts.push(delta.text)
        self._parts.finish()
        return self._with_ids(
            delta,
            {
                "index": self._index,
                "message": {"role": "assistant", **self._parts.message(), "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": self._parts.finish_reason(reason),
            },
        )

    def root(self, delta: TextDelta) -> Json:
        if self._prompt_top is None:
            return {}
        entries = prompt_entries(
            self._prompt.ids,
            delta.prompt_logprobs or (),
            tokenizer=self._tokenizer,
            num_top=self._prompt_top,
        )
        return {"prompt_logprobs": entries}

    def _with_ids(self, delta: TextDelta, choice: Json) -> Json:
        if self._wants_token_ids:
            choice["token_ids"] = delta.ids
        return choice

    def _logprobs(self, delta: TextDelta) -> Json | None:
        if self._num_top is None or delta.logprobs is None:
            return None
        content = chat_content(delta.ids, delta.logprobs, tokenizer=self._tokenizer, num_top=self._num_top)
        return {"content": content, "refusal": None}


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """All deltas of a choice as one."""
    first = TextDelta(text="", ids=()) if not deltas else deltas[0]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return msgspec.structs.replace(
        first,
        text="".join(delta.text for delta in deltas),
        ids=tuple(token_id for delta in deltas for token_id in delta.ids),
        logprobs=tuple(entry for block in logprobs for entry in block) if logprobs else None,
    )


def usage(prompt_lens: Sequence[int], ends: Mapping[int, Ended], *, n: int) -> Json:
    """Prompt tokens count once for each prompt, whatever `n`. Predictions are the draft's, not the user's."""
    num_prompt = sum(prompt_lens)
    num_completion = sum(end.num_tokens for end in ends.values())
    outcomes = [ends[first].outcome for first in range(0, len(ends), n)]
    cached = sum(outcome.cached_tokens for outcome in outcomes if outcome is not None)
    stats = [end.speculation for end in ends.values()]
    num_accepted = sum(stat.num_accepted for stat in stats)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(stat.num_drafted for stat in stats) - num_accepted,
        },
    }


def extension(ends: Mapping[int, Ended]) -> Json:
    """What Paceline adds at the root of the last chunk or the body: speculation and the way of the request.

    Over several choices: sums, the slowest first token, and the nodes of the first choice.
    """
    outcomes = [end.outcome for end in ends.values() if end.outcome is not None]
    first = outcomes[0] if outcomes else None
    return {
        "metrics": {"speculative_decoding": speculation(ends)},
        "paceline": {
            "ttft_s": max(end.ttft_s for end in ends.values()),
            "kv_bytes": sum(outcome.kv_bytes for outcome in outcomes) if outcomes else None,
            "transport": first.transport if first else None,
            "prefill": first.prefill_node if first else None,
            "decode": first.decode_node if first else None,
            "attempts": max(outcome.attempts for outcome in outcomes) if outcomes else None,
        },
    }


def speculation(ends: Mapping[int, Ended]) -> Json:
    """`num_spec_steps` counts rounds with drafts; the mean length includes the target's own token.

    The counts of drafts have two names each: ours, and vLLM's, which load generators read.
    """
    stats = [end.speculation for end in ends.values()]
    num_steps = sum(stat.num_steps for stat in stats)
    num_accepted = sum(stat.num_accepted for stat in stats)
    num_drafted = sum(stat.num_drafted for stat in stats)
    length = max((len(stat.histogram) for stat in stats), default=0)
    histogram = [sum(stat.histogram[k] for stat in stats if k < len(stat.histogram)) for k in range(length)]
    return {
        "num_spec_steps": num_steps,
        "num_drafted": num_drafted,
        "num_accepted": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": num_accepted,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
        "acceptance_histogram": histogram,
    }
