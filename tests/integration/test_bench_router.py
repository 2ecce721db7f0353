"""The router measurement end to end with a handful of requests: real registry, stub nodes, router, client."""

import pytest

from bench.router import RouterBench, measure
from tests.smollm2_text import smollm2_tokenizer_folder

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


async def test_every_request_of_the_load_gets_every_token_from_the_stub_nodes() -> None:
    bench = RouterBench(
        num_latency=3, num_requests=8, num_warm_up=2, concurrency=4, num_tokens=10, step_s=0.001
    )
    result = await measure(smollm2_tokenizer_folder(), bench, report=lambda _: None)
    for load in ("at_once", "paced"):
        assert result[load]["num_failed"] == 0
        assert result[load]["events_per_request"] == 12  # ten tokens, the finish reason, the end
    assert result["tokens_per_request"] == 10
    assert {"added_ms_median", "added_ms_p99", "requests_per_s", "cpu_ms_per_request"} <= result.keys()
