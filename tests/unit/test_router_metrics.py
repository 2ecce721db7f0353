"""What a router counts of requests, under which names, and that their number does not grow with requests."""

import asyncio
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.admin import AdminPages
from router.http_edge import by_port
from router.metrics import ROUTER_METRICS, VLLM_ROUTER_METRICS
from router.overview import Overview
from router.recent import BUCKET_S, NUM_BUCKETS, NUM_REQUESTS, Recent
from router.requests import Stage, Summary
from router.stages import stages_of, unfinished_stages
from router.stats import RouterStats
from tests.fakes_dispatch import FakeDispatcher, FakeOperations, http_app, one_key
from tests.fakes_nodes import Cluster, a_request, cluster, reading, settle, virtual
from tests.smollm2_text import smollm2_text
from wire.loop_lag import LoopLag
from wire.records import Load, NodeRecord
from wire.tally import TOKEN_SECONDS, Tally
from wire.work import PromptInfo, TransferId

TID = TransferId("r1", 1)


class Sight:
    """A registry seen well."""

    num_failures = 0
    is_stale = False

    def __init__(self, made: Cluster) -> None:
        self._made = made

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        return self._made.registry.records


def overview(made: Cluster) -> Overview:
    return Overview(
        work=made.dispatcher,
        pairs=made.pairs,
        stats=made.stats,
        nodes=Sight(made),
        lag=LoopLag(),
        model=lambda: "m",
        settings={"policy": "least_load"},
    )


def series(text: bytes) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def one_request(made: Cluster) -> None:
    """Prompt of 3, of which 2 cached; 5 tokens in rounds of 1 drafted 3 kept 1, and drafted 2 kept none."""
    async with reading(made, a_request(max_tokens=5)):
        p, d = made["p1"], made["d1"]
        p.emit(PromptInfo(tid=TID, cached_tokens=2))
        await asyncio.sleep(0.25)
        p.tokens(0, 10)
        await settle()
        p.finish("handed_over", queue_s=0.05, compute_s=0.2, kv_bytes=64)
        await asyncio.sleep(0.1)
        d.tokens(1, 11, 12, drafted=3, accepted=1)
        await settle()
        await asyncio.sleep(0.3)
        d.tokens(3, 13, drafted=2)
        d.tokens(4, 14)
        d.finish(
            "length",
            queue_s=0.3,
            compute_s=0.35,
            transfer_s=0.15,
            kv_bytes=64,
            transport="memory",
            num_steps=3,
        )
        await settle()


@virtual
async def test_a_request_shows_under_our_names_and_under_those_of_vllm() -> None:
    load = Load(free_pages=3, total_pages=4, running=2, waiting=1)
    async with cluster(loads={"d1": load}) as made:
        await one_request(made)
        found = series(overview(made).metrics())
    expected = {
        "paceline_router_requests_total{outcome=length}": 1,
        "paceline_router_tokens_total{kind=cached}": 2,
        "paceline_router_tokens_total{kind=drafted}": 5,
        "paceline_router_tokens_total{kind=accepted}": 1,
        "paceline_router_draft_rounds_total": 2,
        "paceline_router_accepted_at_total{position=0}": 1,
        "paceline_router_in_flight": 0,
        "paceline_router_pairs{state=ready}": 1,
        "paceline_router_node_pages_free{node=d1,role=decode}": 3,
        "paceline_router_ttft_seconds_count": 1,
        "paceline_router_itl_seconds_count": 3,
        "paceline_degraded_total{what=registry_away}": 0,
        "vllm:num_requests_running{model_name=m}": 0,
        "vllm:kv_cache_usage_perc{model_name=m}": 0.25,
        "vllm:generation_tokens_total{model_name=m}": 5,
        "vllm:prefix_cache_hits_total{model_name=m}": 2,
        "vllm:request_success_total{finished_reason=length,model_name=m}": 1,
        "vllm:spec_decode_num_drafts_total{model_name=m}": 2,
        "vllm:spec_decode_num_draft_tokens_total{model_name=m}": 5,
        "vllm:spec_decode_num_accepted_tokens_total{model_name=m}": 1,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=m,position=0}": 1,
        "vllm:time_to_first_token_seconds_count{model_name=m}": 1,
        "vllm:e2e_request_latency_seconds_count{model_name=m}": 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    stages = {s: found[f"paceline_router_stage_seconds_sum{{stage={s}}}"] for s in ("queue", "prefill")}
    assert stages == {"queue": pytest.approx(0.05), "prefill": pytest.approx(0.2)}
    assert found["paceline_router_stage_seconds_sum{stage=transfer}"] == pytest.approx(0.15)
    assert found["paceline_router_stage_seconds_sum{stage=decode}"] == pytest.approx(0.35)


@virtual
async def test_the_feed_has_the_request_s_time_line_and_the_flow_of_its_pair() -> None:
    async with cluster() as made:
        await one_request(made)
        feed = overview(made).feed()
    [request] = feed["requests"]
    assert (request["id"], request["outcome"], request["prefill"], request["decode"]) == (
        "r1",
        "length",
        "p1",
        "d1",
    )
    assert [(stage["name"], stage["start_s"], stage["end_s"]) for stage in request["stages"]] == [
        ("queue", 0.0, 0.05),
        ("prefill", 0.05, 0.25),
        ("transfer", 0.15, 0.3),
        ("decode", 0.3, 0.65),
    ]
    assert feed["flows"] == [{"prefill": "p1", "decode": "d1", "bytes": 64, "requests": 1}]
    [bucket] = feed["series"]
    assert (bucket["requests"], bucket["acceptance"], bucket["mean_accepted"]) == (1, 0.2, 0.5)
    assert bucket["ttft_p50_s"] == pytest.approx(0.25)


@virtual
async def test_a_node_s_metrics_are_a_target_while_it_is_in_the_registry() -> None:
    async with cluster() as made:
        assert overview(made).targets() == []
        made.registry.update("d1", metrics_address="d1:9")
        expected = [{"targets": ["d1:9"], "labels": {"role": "decode", "model": made["d1"].record.model}}]
        assert overview(made).targets() == expected


@virtual
async def test_series_do_not_grow_with_requests() -> None:
    async with cluster() as made:
        await one_request(made)
        before = series(overview(made).metrics()).keys()
        for number in range(2, 12):
            tid = f"r{number}"
            async with reading(made, a_request(max_tokens=1, label=tid, cache_salt=tid, trace_context=tid)):
                made["p1"].emit(PromptInfo(tid=TransferId(tid, 1), cached_tokens=0))
                await settle()
        after = series(overview(made).metrics()).keys()
    assert after - before == {"paceline_router_requests_total{outcome=closed}"} | {
        name for name in after if "finished_reason=abort" in name
    }


def test_names_are_unique_and_no_label_is_a_request_s_own() -> None:
    table = (*ROUTER_METRICS, *VLLM_ROUTER_METRICS)
    assert len({metric.name for metric in table}) == len(table)
    labels = {label for metric in table for label in metric.labels}
    assert labels == {
        *("outcome", "kind", "cause", "policy", "decision", "position", "route", "method", "status"),
        *("what", "state", "role", "node", "stage", "finished_reason"),
    }


async def test_http_requests_are_counted_by_route_never_by_path() -> None:
    operations = FakeOperations()
    transport = httpx.ASGITransport(
        app=http_app(FakeDispatcher(script=(5, 2)), smollm2_text(), operations=operations)
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        await http.get("/live")
        await http.get("/livez")
        await http.get("/v1/models/a")
        await http.get("/nothing/4711")
        await http.request("BREW", "/live")
        await http.post("/v1/completions", content="{", headers={"content-type": "application/json"})
        await http.get("/v1/completions")
    assert operations.answers == [
        ("/live", "GET", 200),
        ("/live", "GET", 200),
        ("/v1/models/{model:path}", "GET", 404),
        ("other", "GET", 404),
        ("/live", "other", 405),
        ("/v1/completions", "POST", 400),
        ("/v1/completions", "GET", 405),
    ]


def test_a_route_is_one_label_whatever_slashes_it_has() -> None:
    stats = RouterStats()
    stats.answered("/v1/models/{model:path}", method="GET", status=404, seconds=0.5)
    name = "paceline_router_http_requests_total{method=GET,route=/v1/models/{model:path},status=404}"
    assert stats.snapshot()[name] == 1
    assert stats.snapshot()["paceline_router_http_seconds_count{route=/v1/models/{model:path}}"] == 1


def summary(number: int, *, ended_at: float = 0.0, ending: str = "stop") -> Summary:
    return Summary(
        request_id=f"r{number}",
        ending=ending,
        started_at=ended_at - 1,
        ended_at=ended_at,
        ttft_s=float(number),
        tpot_s=0.01,
        num_prompt_tokens=3,
        num_output_tokens=2,
        num_attempts=1,
        cached_tokens=0,
        drafted=0,
        accepted=0,
        acceptance={},
        gaps=Tally(TOKEN_SECONDS),
        kv_bytes=1,
        transport="memory",
        prefill_node=f"p{number}",
        decode_node="d",
        stages=(),
    )


def test_what_is_remembered_takes_the_same_room_for_ever() -> None:
    recent = Recent()
    for number in range(5000):
        recent.add(summary(number, ended_at=number * BUCKET_S))
    now = 4999 * BUCKET_S
    assert [entry["id"] for entry in recent.requests(now=now)][:2] == ["r4999", "r4998"]
    assert len(recent.requests(now=now)) == NUM_REQUESTS
    assert len(recent.series(now=now)) == NUM_BUCKETS
    assert len(recent.flows()) == 1024
    assert recent.series(now=now + 2 * NUM_BUCKETS * BUCKET_S) == []


def test_failures_and_quantiles_are_those_of_the_moment() -> None:
    recent = Recent()
    for number in range(1, 21):
        recent.add(summary(number, ending="stop" if number > 5 else "node_failed"))
    [bucket] = recent.series(now=BUCKET_S)
    assert (bucket["requests"], bucket["failures"], bucket["output_tokens"]) == (20, 5, 40)
    assert (bucket["ttft_p50_s"], bucket["ttft_p95_s"], bucket["ago_s"]) == (11.0, 20.0, 2.5)


def test_no_stage_reaches_past_the_ends_of_its_request() -> None:
    stages = stages_of(
        since_arrival_s=0.1, total_s=1.0, queue_s=0.2, prefill_s=0.3, transfer_s=9.0, join_s=2.0
    )
    assert stages == (
        Stage(name="queue", start_s=0.0, end_s=0.1 + 0.2),
        Stage(name="prefill", start_s=0.1 + 0.2, end_s=0.1 + 0.2 + 0.3),
        Stage(name="transfer", start_s=0.0, end_s=1.0),
    )
    assert unfinished_stages(1.0, None, 3.0) == (Stage(name="waiting", start_s=0.0, end_s=2.0),)
    assert [stage.end_s for stage in unfinished_stages(1.0, 2.0, 3.0)] == [1.0, 2.0]


async def test_the_live_page_runs_only_its_own_script_and_its_feed_asks_for_the_key() -> None:
    operations = FakeOperations()
    app = http_app(FakeDispatcher(), smollm2_text(), operations=operations, keys=one_key("secret"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as http:
        page = await http.get("/dashboard")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'sha256-" in policy
        assert "unsafe-inline" not in policy
        assert re.findall(r"(?:src|href)=[\"'](?!data:|#)", page.text) == []
        assert (await http.get("/dashboard/data")).status_code == 401
        good = {"authorization": "Bearer secret"}
        feeds = [(await http.get("/dashboard/data", headers=good)).json() for _ in range(3)]
        assert feeds == [{"model": "smol"}] * 3
        assert (await http.get("/metrics/targets")).json()[0]["targets"] == ["d:9"]
    assert operations.num_feeds == 1


async def test_with_a_port_of_their_own_the_main_port_has_no_pages_for_operators() -> None:
    pages = AdminPages(FakeOperations(), authorise=lambda _: None)
    paths = [route.path for route in pages.routes()]
    assert paths == ["/metrics", "/metrics/targets", "/dashboard", "/dashboard/data"]
    paths.append("/openapi.json")
    admin, main = (
        http_app(FakeDispatcher(script=(5, 2)), smollm2_text(), has_admin=has_admin)
        for has_admin in (True, False)
    )
    transport = httpx.ASGITransport(app=by_port({9: admin}, otherwise=main))
    async with httpx.AsyncClient(transport=transport) as http:
        for path in paths:
            assert (await http.get(f"http://router:9{path}")).status_code == 200
            assert (await http.get(f"http://router:8{path}")).status_code == 404
        assert (await http.get("http://router:8/live")).status_code == 200
