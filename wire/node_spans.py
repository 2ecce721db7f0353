"""A node's part of traced requests: what its host hears and says, as spans.

Owns which requests are being traced here. Must never know how a span is sent, nor a core: a node's last word
on a request bears the times. Requests without a trace context cost one comparison.
"""

from collections.abc import Callable

from kv_transfer.ids import TransferId
from wire.tracing import Span, Tracer
from wire.work import Cancel, Event, Failed, Finished, Preempted, Rejected, Submit

_MAX_OPEN = 16384  # those of a router that vanished are never ended; the oldest go


class NodeSpans:
    """`clock` is that of the tracer."""

    def __init__(self, *, role: str, tracer: Tracer, clock: Callable[[], float]) -> None:
        self._role = role
        self._tracer = tracer
        self._clock = clock
        self._open: dict[TransferId, tuple[str, float]] = {}

    def close(self) -> None:
        """Hand over what is left; blocks for seconds at most."""
        self._tracer.close()

    def heard(self, message: Submit | Cancel) -> None:
        match message:
            case Submit(tid=tid, trace_context=context) if context:
                self._open[tid] = context, self._clock()
                while len(self._open) > _MAX_OPEN:
                    del self._open[next(iter(self._open))]
            case Cancel(tid=tid):
                self._end(tid, error="cancelled")

    def said(self, event: Event) -> None:
        match event:
            case Finished():
                self._end(event.tid, finished=event)
            case Failed() | Rejected():
                self._end(event.tid, error=event.code)
            case Preempted():
                self._end(event.tid, error="preempted")

    def _end(self, tid: TransferId, *, finished: Finished | None = None, error: str = "") -> None:
        context, start = self._open.pop(tid, ("", 0.0))
        if not context:
            return
        end = self._clock()
        span = Span(
            name=self._role,
            start_s=start,
            end_s=end,
            attributes={
                "paceline.request_id": tid.request_id,
                "paceline.attempt": tid.attempt,
                **({} if finished is None else _facts(finished)),
            },
            error=error,
            children=() if finished is None else self._parts(finished, start, end),
        )
        self._tracer.record(span, parent=context)

    def _parts(self, finished: Finished, start: float, end: float) -> tuple[Span, ...]:
        """Where the time went. KV is on its way before decoding begins, and while the prompt is computed."""
        began = start + finished.queue_s
        arrived = began if self._role == "decode" else end
        parts = (
            Span(name="queue", start_s=start, end_s=began),
            Span(name="transfer", start_s=max(start, arrived - finished.transfer_s), end_s=arrived),
            Span(name="compute", start_s=began, end_s=began + finished.compute_s),
        )
        return tuple(part for part in parts if part.end_s > part.start_s)


def _facts(finished: Finished) -> dict[str, str | int]:
    return {
        "paceline.finish_reason": finished.reason,
        "paceline.kv_bytes": finished.kv_bytes,
        "paceline.transport": finished.transport,
        "paceline.rounds": finished.num_steps,
    }
