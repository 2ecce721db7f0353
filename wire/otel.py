"""Spans to OpenTelemetry. The only module that knows the library; loaded by `wire.tracing` alone.

Owns the mapping of our spans and clocks to theirs. Sending happens on the library's own thread.
"""

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span as TheirSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from wire.tracing import Attribute, Span

_NS = 1_000_000_000
_CLOSE_MS = 3000


class _Open:
    def __init__(self, span: TheirSpan, context: str, wall_offset_s: float) -> None:
        self.context = context
        self._span = span
        self._wall_offset_s = wall_offset_s

    def end(self, *, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None:
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(int((at + self._wall_offset_s) * _NS))


class OtelTracer:
    """One process's spans."""

    def __init__(self, exporter: SpanExporter, *, service: str, instance: str, wall_offset_s: float) -> None:
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paceline")
        self._propagator = TraceContextTextMapPropagator()
        self._wall_offset_s = wall_offset_s

    def start(self, name: str, *, parent: str, at: float) -> _Open:
        span = self._tracer.start_span(
            name, context=self._context(parent), kind=SpanKind.SERVER, start_time=self._ns(at)
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return _Open(span, carrier["traceparent"], self._wall_offset_s)

    def record(self, span: Span, *, parent: str) -> None:
        self._record(span, self._context(parent))

    def close(self) -> None:
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()

    def _record(self, span: Span, context: Context) -> None:
        theirs = self._tracer.start_span(
            span.name, context=context, attributes=dict(span.attributes), start_time=self._ns(span.start_s)
        )
        if span.error:
            theirs.set_status(Status(StatusCode.ERROR, span.error))
        inside = set_span_in_context(theirs, context)
        for child in span.children:
            self._record(child, inside)
        theirs.end(self._ns(span.end_s))

    def _context(self, parent: str) -> Context:
        return self._propagator.extract({"traceparent": parent} if parent else {}, Context())

    def _ns(self, at: float) -> int:
        return int((at + self._wall_offset_s) * _NS)


def create(endpoint: str, *, service: str, instance: str, wall_offset_s: float) -> OtelTracer:
    """To a collector; `https://` endpoints are encrypted."""
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    return OtelTracer(exporter, service=service, instance=instance, wall_offset_s=wall_offset_s)
