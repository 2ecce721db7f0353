"""What the processes of a real cluster tell those who watch: metrics, traces and logs."""

import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.cluster import eventually
from tests.integration.four_pairs.conftest import FourPairs
from tests.integration.reference import COUNTING

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(600)]

MARKER = "zyzzyva"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


def total(text: str, name: str, **labels: str) -> float:
    """Sum of the series of one name that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def node_metrics(four_pairs: FourPairs) -> str:
    """Of all nodes together, as the router says where to find them."""
    targets = (await four_pairs.router.http.get("/metrics/targets")).json()
    assert sorted(target["labels"]["role"] for target in targets) == ["decode"] * 4 + ["prefill"]
    texts = []
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for target in targets:
            [address] = target["targets"]
            texts.append((await client.get(f"http://{address}/metrics")).text)
            assert (await client.get(f"http://{address}/health")).status_code == 200
    return "\n".join(text.replace("# EOF", "") for text in texts)


async def test_requests_show_in_the_metrics_of_the_router_and_of_every_node(four_pairs: FourPairs) -> None:
    http = four_pairs.router.http
    before = (await http.get("/metrics")).text
    for _ in range(4):
        await four_pairs.router.complete(prompt=COUNTING, max_tokens=16, temperature=0)
    after = (await http.get("/metrics")).text

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert grown("paceline_router_requests_total", outcome="length") == 4
    assert grown("vllm:generation_tokens_total") == 64
    assert grown("vllm:e2e_request_latency_seconds_count") == 4
    assert grown("paceline_router_stage_seconds_count", stage="transfer") == 4
    assert grown("paceline_router_stage_seconds_sum", stage="prefill") > 0
    assert grown("paceline_router_http_requests_total", route="/v1/completions", status="200") == 4
    assert grown("vllm:spec_decode_num_draft_tokens_total") > 0
    nodes = await node_metrics(four_pairs)
    for transport in ("nixl", "grpc"):
        assert total(nodes, "paceline_transfer_bytes_total", role="decode", transport=transport) > 0
        assert total(nodes, "paceline_transfer_seconds_count", role="prefill", transport=transport) > 0
    assert total(nodes, "paceline_node_prefill_seconds_sum", role="prefill") > 0
    assert total(nodes, "paceline_node_accepted_at_total", position="0") > 0
    assert total(nodes, "vllm:request_success_total", finished_reason="length") >= 4
    assert total(nodes, "paceline_node_prefix_query_tokens_total", role="prefill") > 0
    assert total(nodes, "paceline_transfer_faults_total") == 0
    assert total(nodes, "paceline_loop_lag_seconds_count") > 0


SPANS = {
    ("paceline-router", "request"),
    ("paceline-prefill", "prefill"),
    ("paceline-prefill", "compute"),
    ("paceline-decode", "decode"),
    ("paceline-decode", "compute"),
}


async def test_one_trace_goes_through_router_prefill_and_decode(four_pairs: FourPairs) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = {"prompt": COUNTING, "max_tokens": 4, "temperature": 0}
    answer = await four_pairs.router.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    collector = four_pairs.collector

    async def missing() -> str:
        found = {(span.service, span.name) for span in collector.of_trace(TRACE)}
        return ", ".join(map(" ".join, SPANS - found))

    await eventually(missing, within_s=60)
    spans = {(span.service, span.name): span for span in collector.of_trace(TRACE)}
    request = spans["paceline-router", "request"]
    prefill, decode = spans["paceline-prefill", "prefill"], spans["paceline-decode", "decode"]
    assert request.parent == CALLER
    assert {prefill.parent, decode.parent} == {request.span}
    assert spans["paceline-prefill", "compute"].parent == prefill.span
    assert spans["paceline-decode", "compute"].parent == decode.span
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert prefill.attributes["paceline.finish_reason"] == "handed_over"
    assert decode.attributes["paceline.request_id"] == request.attributes["paceline.request_id"]
    slack = 1_000_000_000  # three processes on a busy machine
    assert request.start - slack <= prefill.start <= prefill.end
    assert request.start - slack <= decode.start <= decode.end <= request.end + slack


async def test_no_log_and_no_span_has_a_word_of_a_prompt_good_or_bad(four_pairs: FourPairs) -> None:
    http = four_pairs.router.http
    good = {"prompt": f"the {MARKER} weevil", "max_tokens": 2, "temperature": 0}
    assert (await http.post("/v1/completions", json=good)).status_code == 200
    chat = {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 2, "stream": True}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    refused = [
        {**good, "temperature": MARKER},
        {**good, "max_tokens": 10**9},
        {"messages": [{"role": MARKER, "content": MARKER}]},
    ]
    for body in refused:
        assert (await http.post("/v1/completions", json=body)).status_code == 400
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 400
    kind = {"content-type": "application/json"}
    assert (await http.post("/v1/completions", content=f"{{{MARKER}", headers=kind)).status_code == 400
    logs = sorted(four_pairs.router.child.log.parent.glob("*.log"))
    assert len(logs) == 7
    for log in logs:
        lines = log.read_text().splitlines()
        assert [line for line in lines if MARKER in line] == []
        if "colocated" not in log.name:  # the only one that was not told to write JSON
            entries = [json.loads(line) for line in lines if line.startswith("{")]
            assert entries, log.name
            assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)
    assert MARKER not in repr(four_pairs.collector.spans)
