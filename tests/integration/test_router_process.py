"""The router as a process of its own, before any node or registry is there."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from deploy.ports import free_port
from router.config import RouterConfig
from tests.smollm2_text import smollm2_tokenizer_folder
from wire.gen import generate_pb2, generate_pb2_grpc

PATIENCE_S = 90.0
NO_REGISTRY = "redis://127.0.0.1:1/0"


@asynccontextmanager
async def router(*flags: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str, str]]:
    """The process, its URL and its gRPC address."""
    command = [sys.executable, "-m", "router", "--model", str(smollm2_tokenizer_folder())]
    ports = ["--port", "0", "--grpc-port", "0", "--registry", NO_REGISTRY]
    process = await asyncio.create_subprocess_exec(
        *command, *ports, *flags, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = (await asyncio.wait_for(process.stderr.readline(), timeout=PATIENCE_S)).decode()
            assert line, "the router ended before it listened"
            found = re.search(r"listening on (http://\S+) and grpc://(\S+)", line)
        yield process, found[1], found[2]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_router_without_nodes_is_alive_but_not_ready_and_says_why() -> None:
    admin = free_port()
    async with (
        router("--admin-port", f"{admin}") as (process, url, grpc_address),
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        assert (await http.get("/live")).status_code == 200
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["ready"], ready.json()["pairs"]) == (503, False, [])
        refused = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_pair")
        assert refused.headers["retry-after"] == "1"
        assert (await http.get("/metrics")).status_code == (await http.get("/dashboard")).status_code == 404
        metrics = await http.get(f"http://127.0.0.1:{admin}/metrics")
        assert b"paceline_router_in_flight 0.0" in metrics.content
        counted = 'http_requests_total{method="POST",route="/v1/completions",status="503"} 1.0'
        assert f"paceline_router_{counted}" in metrics.text
        assert (await http.get(f"http://127.0.0.1:{admin}/dashboard")).status_code == 200
        async with grpc.aio.insecure_channel(grpc_address) as channel:
            call = generate_pb2_grpc.GenerationStub(channel).Generate(
                generate_pb2.GenerateRequest(text="hi", sampling=generate_pb2.Sampling(max_tokens=1))
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), timeout=PATIENCE_S) == 0


async def test_a_port_that_is_taken_is_named() -> None:
    async with router() as (_, url, _):
        port = url.rpartition(":")[2]
        with pytest.raises(AssertionError, match="ended before it listened"):
            async with router("--port", port):
                pass


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"port must be in \[0, 65535\], got 70000"):
        RouterConfig(model="m", port=70000)
    with pytest.raises(ValueError, match="policy must be one of"):
        RouterConfig(model="m", policy="best")
    with pytest.raises(ValueError, match="request_timeout_s must be positive, got 0"):
        RouterConfig(model="m", request_timeout_s=0)
