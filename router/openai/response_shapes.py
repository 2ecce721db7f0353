"""The answers of /v1/responses as JSON values: the response around its output, and the events of a stream.

Owns their form and the numbering of events. Must never know where tokens come from, what the output is made
of or how bytes are sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import Overloaded, RouterError
from router.generation import Ended
from router.openai.exchange import sse
from router.openai.response_output import Event, ResponseOutput
from router.openai.shapes import Envelope, extension

Json = dict[str, Any]

_FIXED: Mapping[str, Any] = {
    "object": "response",
    "background": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "truncation": "disabled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """One response. `shown`: what it repeats of the request."""

    envelope: Envelope
    shown: Mapping[str, Any]
    num_prompt_tokens: int

    def unfinished(self) -> Json:
        return self._response(status="in_progress", output=[])

    def failed(self, error: RouterError) -> Json:
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        failure = {"code": code, "message": error.message, "param": error.param, "type": error.type}
        return self._response(status="failed", output=[], error=failure)

    def whole(self, output: ResponseOutput, end: Ended, *, completed_at: int) -> Json:
        """The finished response."""
        status = "incomplete" if end.is_cut else "completed"
        return {
            **self._response(status=status, output=output.items),
            "incomplete_details": {"reason": "max_output_tokens"} if end.is_cut else None,
            "completed_at": completed_at,
            "usage": self._usage(end, num_reasoning_tokens=output.num_reasoning_tokens),
            **extension({0: end}),
        }

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

    def _usage(self, end: Ended, *, num_reasoning_tokens: int) -> Json:
        cached = 0 if end.outcome is None else end.outcome.cached_tokens
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": end.num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + end.num_tokens,
        }


class EventWriter:
    """Numbers the events of one stream."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._next = 0

    @property
    def is_open(self) -> bool:
        return self._next > 0

    def opening(self) -> bytes:
        """Everything before the first item."""
        started = {"response": self._shape.unfinished()}
        return self.written([("response.created", started), ("response.in_progress", started)])

    def written(self, events: Sequence[Event]) -> bytes:
        return b"".join([self._event(kind, fields) for kind, fields in events])

    def closing(self, response: Json) -> bytes:
        """Everything after the last item."""
        return self._event(f"response.{response['status']}", {"response": response})

    def failed(self, error: RouterError) -> bytes:
        return self._event("response.failed", {"response": self._shape.failed(error)})

    def _event(self, kind: str, fields: Json) -> bytes:
        event = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return sse(event, kind=kind)
