"""An OpenTelemetry collector that keeps what it is sent: the other end of `--otlp-endpoint`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One span. Ids are hexadecimal; times are nanoseconds since the epoch."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Received] = []

    async def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [_received(span, resource["service.name"]) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace: str) -> list[Received]:
        return [span for span in self.spans if span.trace == trace]


def _received(span: Any, service: str) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes={pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes},
    )


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    server = grpc.aio.server()
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
