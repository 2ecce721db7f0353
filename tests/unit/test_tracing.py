"""Spans of one request across the router and its nodes, and nothing of it where nobody asked."""

import asyncio
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.dispatch import DispatchConfig, Dispatcher
from tests.fakes_nodes import Cluster, Reader, a_request, cluster, settle, virtual
from tests.unit.source_tree import ROOT
from wire.monitoring import Monitoring
from wire.node_spans import NodeSpans
from wire.otel import OtelTracer
from wire.tracing import NO_TRACES, Tracer, tracer_for
from wire.work import Cancel, Failed, Finished, TransferId

WALL_S = 1_000_000.0
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TID = TransferId("r1", 1)


def tracer(exporter: InMemorySpanExporter, service: str) -> OtelTracer:
    return OtelTracer(exporter, service=service, instance="i", wall_offset_s=WALL_S)


async def ask(made: Cluster, traces: Tracer, *, ending: str = "length") -> None:
    """One request of two tokens, in a second."""
    dispatcher = Dispatcher(
        made.links, made.pairs, stats=made.stats, config=DispatchConfig(), new_id=lambda: "r1", tracer=traces
    )
    context = f"00-{TRACE}-{CALLER}-01"
    reader = Reader(dispatcher, a_request(max_tokens=2, trace_context=context))
    task = asyncio.ensure_future(reader.run())
    await asyncio.sleep(1)
    if ending == "length":
        made["p1"].tokens(0, 10)
        made["p1"].finish("handed_over")
        made["d1"].tokens(1, 11)
        made["d1"].finish("length")
    else:
        made["d1"].emit(Failed(tid=TID, code=ending, retryable=False, reason="no"))
    await settle()
    await task


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9 - WALL_S, span.end_time / 1e9 - WALL_S


@virtual
async def test_the_spans_of_three_processes_make_one_tree() -> None:
    exporter = InMemorySpanExporter()
    traces = tracer(exporter, "paceline-router")
    async with cluster() as made:
        started = asyncio.get_running_loop().time()
        await ask(made, traces)
        submits = made["p1"].submits[0], made["d1"].submits[0]
    traces.close()
    request = by_name(exporter)["request"]
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, CALLER)
    assert list(seconds(request)) == pytest.approx([started, started + 1])
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.output_tokens"] == 2
    assert request.attributes["paceline.outcome"] == "length"
    context = f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert {submit.trace_context for submit in submits} == {context}

    now = [10.0]
    for role, submit, spoken in (
        (
            "prefill",
            submits[0],
            Finished(tid=TID, reason="handed_over", queue_s=1, compute_s=2, transfer_s=4),
        ),
        ("decode", submits[1], Finished(tid=TID, reason="length", queue_s=3, compute_s=5, transfer_s=1)),
    ):
        exporter = InMemorySpanExporter()
        theirs = tracer(exporter, f"paceline-{role}")
        spans = NodeSpans(role=role, tracer=theirs, clock=lambda: now[0])
        now[0] = 10.0
        spans.heard(submit)
        now[0] = 18.0
        spans.said(spoken)
        spans.close()
        found = by_name(exporter)
        parent = found[role].parent
        assert parent is not None
        assert parent.span_id == request.context.span_id
        times = {name: seconds(span) for name, span in found.items()}
        if role == "prefill":
            parts = {"queue": (10, 11), "compute": (11, 13), "transfer": (14, 18), "prefill": (10, 18)}
        else:
            parts = {"queue": (10, 13), "transfer": (12, 13), "compute": (13, 18), "decode": (10, 18)}
        assert times.keys() == parts.keys()
        assert all(list(times[name]) == pytest.approx(list(part)) for name, part in parts.items())


@virtual
async def test_a_request_that_failed_is_an_error_on_router_and_node() -> None:
    exporter = InMemorySpanExporter()
    traces = tracer(exporter, "x")
    async with cluster() as made:
        await ask(made, traces, ending="bad_logits")
        submit = made["d1"].submits[0]
    spans = NodeSpans(role="decode", tracer=traces, clock=lambda: 1.0)
    spans.heard(submit)
    spans.said(Failed(tid=TID, code="bad_logits", retryable=False, reason="no"))
    spans.said(Failed(tid=TID, code="bad_logits", retryable=False, reason="again"))  # nothing to end
    spans.heard(submit)
    spans.heard(Cancel(tid=TID))
    traces.close()
    found = exporter.get_finished_spans()
    said = [(span.name, span.status.is_ok, span.status.description) for span in found]
    assert said == [
        ("request", False, "node_failed"),
        ("decode", False, "bad_logits"),
        ("decode", False, "cancelled"),
    ]


@virtual
async def test_without_tracing_a_client_s_context_is_handed_on_as_it_came() -> None:
    async with cluster() as made:
        await ask(made, NO_TRACES)
        assert made["p1"].submits[0].trace_context == f"00-{TRACE}-{CALLER}-01"
    assert tracer_for("", service="s", instance="i", wall_offset_s=0.0) is NO_TRACES


def test_a_process_without_the_library_runs_until_it_is_asked_to_trace() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
import router.node, wire.node_app
from wire.tracing import tracer_for
assert "wire.otel" not in sys.modules
try:
    tracer_for("http://h:1", service="s", instance="i", wall_offset_s=0.0)
except ValueError as error:
    assert "otlp_endpoint needs paceline[otel]" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ValueError, match="otlp_endpoint must be a URL"):
        Monitoring(otlp_endpoint="collector:4317")
