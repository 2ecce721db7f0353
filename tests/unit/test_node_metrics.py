import asyncio
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kv_transfer.ids import Incarnation
from wire.host_events import NodeStatus
from wire.loop_lag import LoopLag
from wire.metric import Metric
from wire.metrics_server import MetricsServer, Page
from wire.node_metrics import NODE_METRICS, VLLM_NODE_METRICS, NodeReading, node_text
from wire.node_watch import NodeWatch
from wire.records import Load, NodeRecord
from wire.tally import Distribution, Tally

RECORD = NodeRecord(
    role="decode",
    address="h:1",
    incarnation=Incarnation("i1"),
    model="m",
    layout="f",
    page_size=16,
    max_model_len=64,
    vocab_size=9,
    transports=("memory",),
)
STATUS = NodeStatus(
    step=3,
    load=Load(free_pages=6, total_pages=8, running=2, waiting=1, queued_tokens=40),
    quarantined_pages=1,
    is_draining=False,
    is_idle=False,
    integrity="",
    counters={
        "engine_steps": 3.0,
        "rounds": 7.0,
        "accepted_at_0": 5.0,
        "accepted_at_1": 2.0,
        "seedless_joins": 4.0,
        "transfer_bytes/nixl": 4096.0,
        "transfer_failures/grpc/no_progress": 2.0,
        "transfer_faults/second final in landed": 1.0,
        "finished/stop": 3.0,
    },
    peers={"p1": "ready over nixl", "p2": "refused at handshake: dtype", "p3": "no answer yet"},
    distributions={"queue_s": Distribution(bounds=(0.5, 1.0), counts=(1, 0, 2), total=7.5)},
)


def series(text: bytes) -> dict[str, float]:
    """name{label=value,...}, the node's own constant labels left out, to value."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            own = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("role", "model_name")]
            found[f"{sample.name}{{{','.join(own)}}}" if own else sample.name] = sample.value
    return found


def scraped(status: NodeStatus = STATUS) -> dict[str, float]:
    lag = Distribution(bounds=(1.0,), counts=(0, 0), total=0.0)
    return series(node_text(NodeReading(record=RECORD, status=status, lag=lag)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("paceline_node_pages", 8),
        ("paceline_node_pages_free", 6),
        ("paceline_node_pages_quarantined", 1),
        ("paceline_node_requests_running", 2),
        ("paceline_node_engine_steps_total", 3),
        ("paceline_node_accepted_at_total{position=1}", 2),
        ("paceline_transfer_bytes_total{transport=nixl}", 4096),
        ("paceline_transfer_failures_total{code=no_progress,transport=grpc}", 2),
        ("paceline_transfer_faults_total{fault=second final in landed}", 1),
        ("paceline_node_peers{state=ready}", 1),
        ("paceline_node_peers{state=refused}", 1),
        ("paceline_node_peers{state=connecting}", 1),
        ("paceline_degraded_total{what=seedless_join}", 4),
        ("paceline_degraded_total{what=simulated_acceptance}", 0),
        ("paceline_node_queue_seconds_bucket{le=1}", 1),
        ("paceline_node_queue_seconds_bucket{le=+Inf}", 3),
        ("paceline_node_queue_seconds_sum", 7.5),
        ("paceline_node_info{address=h:1,incarnation=i1,layout=f}", 1),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:num_requests_running", 2),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}", 5),
        ("vllm:request_success_total{finished_reason=stop}", 3),
        ("vllm:cache_config_info{block_size=16,num_gpu_blocks=8}", 1),
    ],
)
def test_a_reading_finds_its_metric(name: str, value: float) -> None:
    found = {key.replace("le=1.0", "le=1"): number for key, number in scraped().items()}
    assert found[name] == value


def test_rounds_whose_text_is_wrong_on_purpose_are_degraded_ones() -> None:
    counters = {"rounds": 7.0, "simulated_acceptance": 1.0}
    status = NodeStatus(
        step=0,
        load=Load(),
        quarantined_pages=0,
        is_draining=False,
        is_idle=True,
        integrity="page 3 has two owners",
        counters=counters,
        peers={},
    )
    assert scraped(status)["paceline_degraded_total{what=simulated_acceptance}"] == 7
    assert scraped(status)["paceline_node_page_books_wrong"] == 1


def test_names_are_unique_and_every_metric_says_what_it_is() -> None:
    table = (*NODE_METRICS, *VLLM_NODE_METRICS)
    assert len({metric.name for metric in table}) == len(table)
    assert [metric.name for metric in table if not metric.help or not metric.source] == []


def test_only_counters_are_named_total() -> None:
    with pytest.raises(ValueError, match="name must end with _total exactly for a counter, got 'x'"):
        Metric(name="x", kind="counter", help="h")


def test_a_value_on_a_bound_falls_into_the_bucket_of_that_bound() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        tally.observe(value)
    assert tally.read() == Distribution(bounds=(1.0, 2.0), counts=(2, 2, 1), total=14.0)
    assert tally.read().count == 5


def test_a_clock_that_counts_in_milliseconds_makes_no_negative_lag() -> None:
    lag = LoopLag()
    lag.note(-0.0003)
    assert (lag.last_s, lag.read().total, lag.read().count) == (0.0, 0.0, 1)


async def test_a_loop_that_computes_is_late_by_as_much() -> None:
    lag = LoopLag(interval_s=0.01)
    task = asyncio.ensure_future(lag.run())
    await asyncio.sleep(0)
    time.sleep(0.06)  # noqa: ASYNC251  the loop is kept busy on purpose
    while not lag.read().count:  # noqa: ASYNC110  not for a turn longer: then the next one is told
        await asyncio.sleep(0)
    task.cancel()
    assert lag.last_s >= 0.04


class FakeHost:
    def __init__(self, *, is_stuck: bool = False) -> None:
        self.record = RECORD
        self.last_status: NodeStatus | None = None
        self._is_stuck = is_stuck

    async def status(self) -> NodeStatus:
        if self._is_stuck:
            raise TimeoutError
        return STATUS


async def test_a_node_serves_metrics_and_health_over_http() -> None:
    watch = NodeWatch.listening(host="127.0.0.1", port=0, num_refused=lambda: 3)
    task = asyncio.ensure_future(watch.run(FakeHost()))
    await asyncio.sleep(0)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{watch.port}", trust_env=False, timeout=60
        ) as http:
            answer = await http.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert series(answer.content)["paceline_node_pages"] == 8
            assert series(answer.content)["paceline_node_calls_refused_total"] == 3
            assert (await http.get("/health")).json() == {"status": "ok"}
            ready = {"status": "ok", "role": "decode", "model": "m"}
            assert (await http.get("/ready?x=1")).json() == ready
            assert (await http.get("/nothing")).status_code == 404
            assert (await http.post("/metrics")).status_code == 405
            assert (await http.head("/health")).content == b""
            assert (await http.get("/health", headers={"x": "y" * 20_000})).status_code == 400
    finally:
        task.cancel()
        await watch.stop()


async def test_a_busy_engine_answers_with_its_last_heartbeat() -> None:
    host = FakeHost(is_stuck=True)
    watch = NodeWatch.listening(host="127.0.0.1", port=0)
    task = asyncio.ensure_future(watch.run(host))
    await asyncio.sleep(0)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{watch.port}", trust_env=False, timeout=60
        ) as http:
            assert (await http.get("/metrics")).status_code == 503
            host.last_status = STATUS
            assert (await http.get("/metrics")).status_code == 200
    finally:
        task.cancel()
        await watch.stop()


async def test_a_page_that_fails_ends_its_connection_only() -> None:
    async def broken() -> Page:
        raise RuntimeError("no page")

    async def fine() -> Page:
        return Page(body=b"{}")

    server = MetricsServer(host="127.0.0.1", port=0)
    await server.start({"/broken": broken, "/fine": fine})
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=60
        ) as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get("/broken")
            assert (await http.get("/fine")).status_code == 200
    finally:
        await server.stop()


async def test_a_port_of_minus_one_shows_nothing() -> None:
    assert NodeWatch.listening(host="127.0.0.1", port=-1).port is None
