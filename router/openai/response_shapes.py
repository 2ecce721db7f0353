"""The answers of /v1/responses as JSON values: the response object and the typed events of a stream.

Owns their form and the numbering of events. Must never know where tokens come from or how bytes are sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import Overloaded, RouterError
from router.generation import Ended, TextDelta
from router.openai.exchange import sse
from router.openai.logprobs import chat_content
from router.openai.shapes import Envelope, extension
from router.text.tokenizer import Tokenizer

Json = dict[str, Any]

_FIXED: Mapping[str, Any] = {
    "object": "response",
    "background": False,
    "parallel_tool_calls": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """One response of one message of one part. `shown`: what it repeats of the request."""

    envelope: Envelope
    item_id: str
    shown: Mapping[str, Any]
    num_prompt_tokens: int
    tokenizer: Tokenizer

    def unfinished(self) -> Json:
        return self._response(status="in_progress", output=[])

    def failed(self, error: RouterError) -> Json:
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        failure = {"code": code, "message": error.message, "param": error.param, "type": error.type}
        return self._response(status="failed", output=[], error=failure)

    def whole(self, delta: TextDelta, end: Ended, *, completed_at: int) -> Json:
        """The finished response."""
        is_cut = end.reason == "length"
        return {
            **self._response(status=_status(end), output=[self.item(delta, end)]),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": completed_at,
            "usage": self._usage(end),
            **extension({0: end}),
        }

    def item(self, delta: TextDelta | None, end: Ended | None) -> Json:
        """The message; without content while it has just begun."""
        return {
            "type": "message",
            "id": self.item_id,
            "role": "assistant",
            "status": "in_progress" if end is None else _status(end),
            "content": [] if delta is None else [self.part(delta)],
        }

    def part(self, delta: TextDelta) -> Json:
        return {
            "type": "output_text",
            "annotations": [],
            "logprobs": self.logprobs(delta),
            "text": delta.text,
        }

    def logprobs(self, delta: TextDelta) -> list[Json]:
        if self.envelope.num_top is None or delta.logprobs is None:
            return []
        return chat_content(
            delta.ids, delta.logprobs, tokenizer=self.tokenizer, num_top=self.envelope.num_top
        )

    def _response(self, *, status: str, output: Sequence[Json], error: Json | None = None) -> Json:
        return {
            **_FIXED,
            **self.shown,
            "id": self.envelope.answer_id,
            "created_at": self.envelope.created,
            "completed_at": None,
            "model": self.envelope.model,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "output": output,
            "usage": None,
        }

    def _usage(self, end: Ended) -> Json:
        cached = 0 if end.outcome is None else end.outcome.cached_tokens
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": end.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt_tokens + end.num_tokens,
        }


class EventWriter:
    """Numbers the events of one stream, and says for most of them which part they are about."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._next = 0

    def opening(self) -> bytes:
        """Everything before the first text."""
        shape = self._shape
        started = shape.unfinished()
        empty = TextDelta(text="", ids=())
        return (
            self._event("response.created", response=started)
            + self._event("response.in_progress", response=started)
            + self._event("response.output_item.added", output_index=0, item=shape.item(None, None))
            + self._about_part("response.content_part.added", part=shape.part(empty))
        )

    def delta(self, delta: TextDelta) -> bytes:
        """Nothing when the tokens have neither text nor log-probabilities to show yet."""
        logprobs = self._shape.logprobs(delta)
        if not delta.text and not logprobs:
            return b""
        return self._about_part("response.output_text.delta", delta=delta.text, logprobs=logprobs)

    def closing(self, whole: TextDelta, end: Ended, *, completed_at: int) -> bytes:
        """Everything after the last text."""
        shape = self._shape
        done = {"text": whole.text, "logprobs": shape.logprobs(whole)}
        response = shape.whole(whole, end, completed_at=completed_at)
        return (
            self._about_part("response.output_text.done", **done)
            + self._about_part("response.content_part.done", part=shape.part(whole))
            + self._event("response.output_item.done", output_index=0, item=shape.item(whole, end))
            + self._event(f"response.{_status(end)}", response=response)
        )

    def failed(self, error: RouterError) -> bytes:
        return self._event("response.failed", response=self._shape.failed(error))

    def _about_part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._shape.item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return sse(event, kind=kind)


def _status(end: Ended) -> str:
    return "incomplete" if end.reason == "length" else "completed"
