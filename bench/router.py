"""What a router costs: time to first token it adds, and requests/s, against nodes that compute nothing.

Owns the processes of this measurement and its numbers. Must never know how a router works.
"""

import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import LoadSpec
from bench.servers import cpu_s, module, output_of, registry, running, until_ok
from bench.stats import percentile, summary
from bench.stub_node import StubConfig, command_line
from deploy.local import Report
from deploy.ports import free_port
from deploy.processes import Child
from router.text.tokenizer import Tokenizer

READY_TIMEOUT_S = 180.0
MODEL_NAME = "stub"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBench:
    """How much is sent. `step_s` paces the second load as an engine with that step would.

    `num_latency_tokens` is small: a stub has all tokens at once, and a hundred of them right behind the
    first would be part of what is measured, which no engine does.
    """

    num_latency: int = 300
    num_latency_tokens: int = 4
    num_requests: int = 1500
    num_warm_up: int = 100
    concurrency: int = 64
    num_tokens: int = 100
    num_prompt_tokens: int = 32
    step_s: float = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rig:
    """A router with its two stub nodes."""

    port: int
    router: Child
    stub: Child
    prefill_address: str
    prompt_ids: tuple[int, ...]


async def measure(model: Path, bench: RouterBench, *, report: Report = print) -> dict[str, Any]:
    """The `router` section of the report: added latency, and both loads."""
    token_ids = plain_ids(Tokenizer.from_folder(model), count=bench.num_tokens)
    async with rig(model, token_ids, bench, step_s=None) as at_once:
        report("router: added time to first token")
        added = await _added(at_once, bench)
        report("router: requests/s, all tokens of a request ready at once")
        burst = await _load(at_once, bench)
    async with rig(model, token_ids, bench, step_s=bench.step_s) as paced:
        report("router: requests/s, one token of every request a step")
        steps = await _load(paced, bench)
    return {
        **added,
        **{key: burst[key] for key in ("requests_per_s", "cpu_ms_per_request", "events_per_request")},
        "concurrency": bench.concurrency,
        "tokens_per_request": bench.num_tokens,
        "at_once": burst,
        "paced": {"step_ms": bench.step_s * 1000, **steps},
    }


def plain_ids(tokenizer: Tokenizer, *, count: int) -> tuple[int, ...]:
    """The first `count` tokens that are a space and lower-case letters: each has text at once."""
    found = []
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token_id)
        if piece[:1] == b" " and piece[1:].isalpha() and piece[1:].islower():
            found.append(token_id)
        if len(found) == count:
            return tuple(found)
    raise ValueError(f"the vocabulary must hold {count} plain words, got {len(found)}")


@asynccontextmanager
async def rig(
    model: Path, token_ids: tuple[int, ...], bench: RouterBench, *, step_s: float | None
) -> AsyncIterator[_Rig]:
    """A registry, two stub nodes in one process, and a router that trusts them."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    async with AsyncExitStack() as stack:
        url = await registry(stack, folder)
        config = StubConfig(
            registry=url, model=MODEL_NAME, vocab_size=max(token_ids) + 1, token_ids=token_ids, step_s=step_s
        )
        stub = await stack.enter_async_context(
            running(module("bench.stub_node", command_line(config), called="stub"), folder)
        )
        port = free_port()
        options = ["--model", f"{model}", "--registry", url, "--port", f"{port}", "--grpc-port", "0"]
        router = await stack.enter_async_context(
            running(module("deploy.cli", "router", *options, called="router"), folder)
        )
        await until_ok(f"http://127.0.0.1:{port}/ready", (router, stub), timeout_s=READY_TIMEOUT_S)
        prompt = tuple(token_ids[i % len(token_ids)] for i in range(bench.num_prompt_tokens))
        address = str(json.loads(stub.log.read_text().splitlines()[0])["prefill"])
        yield _Rig(port=port, router=router, stub=stub, prefill_address=address, prompt_ids=prompt)


async def _added(rig: _Rig, bench: RouterBench) -> dict[str, float]:
    """Client-observed TTFT minus the direct call next to it."""
    bench = dataclasses.replace(bench, num_tokens=bench.num_latency_tokens)
    await _run(rig, bench, num_requests=bench.num_warm_up, concurrency=1)
    result = await _run(rig, bench, num_requests=bench.num_latency, concurrency=1, direct=rig.prefill_address)
    added = [
        1000 * (ours - direct) for ours, direct in zip(result["ttft_s"], result["direct_s"], strict=True)
    ]
    return {
        "added_ms_median": summary(added).median,
        "added_ms_p99": percentile(added, 99),
        "ttft_ms_median": 1000 * summary(result["ttft_s"]).median,
        "direct_ms_median": 1000 * summary(result["direct_s"]).median,
    }


async def _load(rig: _Rig, bench: RouterBench) -> dict[str, float]:
    await _run(rig, bench, num_requests=bench.num_warm_up, concurrency=bench.concurrency)
    before = cpu_s(rig.router.pid), cpu_s(rig.stub.pid)
    result = await _run(rig, bench, num_requests=bench.num_requests, concurrency=bench.concurrency)
    router_s, stub_s = cpu_s(rig.router.pid) - before[0], cpu_s(rig.stub.pid) - before[1]
    count = bench.num_requests
    return {
        "requests_per_s": count / result["elapsed_s"],
        "tokens_per_s": count * bench.num_tokens / result["elapsed_s"],
        "events_per_request": result["num_events"] / count,
        "cpu_ms_per_request": 1000 * router_s / count,
        "router_cpu_share": router_s / result["elapsed_s"],
        "client_cpu_ms_per_request": 1000 * result["client_cpu_s"] / count,
        "stub_cpu_ms_per_request": 1000 * stub_s / count,
        "ttft_ms_median": 1000 * summary(result["ttft_s"]).median,
        "ttft_ms_p99": 1000 * percentile(result["ttft_s"], 99),
        "num_failed": result["num_failed"],
    }


async def _run(
    rig: _Rig, bench: RouterBench, *, num_requests: int, concurrency: int, direct: str = ""
) -> dict[str, Any]:
    spec = LoadSpec(
        host="127.0.0.1",
        port=rig.port,
        prompt_ids=rig.prompt_ids,
        max_tokens=bench.num_tokens,
        num_requests=num_requests,
        concurrency=concurrency,
        direct=direct,
    )
    output = await output_of(module("bench.load", json.dumps(dataclasses.asdict(spec)), called="load"))
    result: dict[str, Any] = json.loads(output)
    return result
