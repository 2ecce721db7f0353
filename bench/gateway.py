"""`paceline bench gateway`: what the router adds to a request and to every event, next to another gateway.

Owns the contenders of this measurement and its numbers. All of them stand before stubs that compute
nothing and are loaded by the same client; the client on a stub itself, without a gateway, is what the added
times are counted from. Must never know how a router works.
"""

import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import stub_node, stub_openai, table
from bench.gateway_config import GatewayBench
from bench.load import LoadSpec
from bench.router import plain_ids
from bench.servers import cpu_s, module, output_of, registry, running, until_ok
from bench.stats import percentile
from deploy import models
from deploy.local import Report
from deploy.ports import free_port
from deploy.processes import Child, Command
from router.text.tokenizer import Tokenizer

READY_TIMEOUT_S = 180.0
MODEL_NAME = "stub"
NUM_WORDS = 8192
NUM_PROMPT_TOKENS = 32
DIRECT = "direct"

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """Where the client sends, and whose CPU time counts: none for the stub alone."""

    port: int
    gateways: tuple[Child, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Tokens that are one word each, and the folder they come from."""

    folder: Path
    ids: tuple[int, ...]
    texts: tuple[str, ...]

    @staticmethod
    def of(folder: Path) -> "Words":
        tokenizer = Tokenizer.from_folder(folder)
        ids = plain_ids(tokenizer, count=NUM_WORDS)
        return Words(folder=folder, ids=ids, texts=tuple(tokenizer.token_text(i) for i in ids))


async def run(config: GatewayBench, *, report: Report = print) -> dict[str, Any]:
    """Measure, print the table, write the file; the numbers."""
    model = models.resolve(config.model, report=report)
    words = Words.of(model.parent if model.is_file() else model)
    contenders = [DIRECT, *config.router_names, *(["smg"] if config.smg else [])]
    rounds: dict[str, list[Numbers]] = {name: [] for name in contenders}
    for index in range(config.rounds):
        for name in contenders:
            report(f"gateway: round {index + 1} of {config.rounds}, {name}")
            rounds[name].append(await _measure(name, config, words))
    numbers = {name: _medians(found) for name, found in rounds.items()}
    result = {
        "settings": dataclasses.asdict(config),
        "contenders": {name: {**own, **_added(own, numbers[DIRECT])} for name, own in numbers.items()},
    }
    _write(config, result)
    report(text(result))
    return result


def _write(config: GatewayBench, result: dict[str, Any]) -> None:
    if config.json:
        Path(config.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def text(result: dict[str, Any]) -> str:
    """The numbers as a table."""
    heads = {
        "added_ttft_ms_median": "TTFT + ms",
        "added_ttft_ms_p99": "p99",
        "added_event_ms_median": "event + ms",
        "added_event_ms_p99": "p99",
        "requests_per_s": "requests/s",
        "chunks_per_s": "chunks/s",
        "cpu_ms_per_request": "CPU ms/request",
    }
    rows = [["", *heads.values()]]
    for name, numbers in result["contenders"].items():
        rows.append([name, *(f"{numbers[key]:.2f}" for key in heads)])
    return table.columns(rows)


async def _measure(name: str, config: GatewayBench, words: Words) -> Numbers:
    """One contender: latency with a stub at the pace of an engine, throughput with one that hurries."""
    async with _rig(name, config, words, step_s=config.step_ms / 1000) as paced:
        slow = await _load(paced, config, words)
    async with _rig(name, config, words, step_s=config.fast_step_ms / 1000) as hurried:
        fast = await _load(hurried, config, words)
    return {
        **{key: slow[key] for key in ("ttft_ms_median", "ttft_ms_p99", "event_ms_median", "event_ms_p99")},
        "cpu_ms_per_request": slow["cpu_ms_per_request"],
        "requests_per_s": fast["requests_per_s"],
        "chunks_per_s": fast["chunks_per_s"],
        "cpu_ms_per_request_hurried": fast["cpu_ms_per_request"],
        "num_failed": slow["num_failed"] + fast["num_failed"],
    }


async def _load(rig: Rig, config: GatewayBench, words: Words) -> Numbers:
    warm_up = min(config.requests, 2 * config.concurrency)
    await _send(rig, config, words, num_requests=warm_up)
    before = sum(cpu_s(child.pid) for child in rig.gateways)
    result = await _send(rig, config, words, num_requests=config.requests)
    used_s = sum(cpu_s(child.pid) for child in rig.gateways) - before
    lateness_ms = [1000 * value for value in result["lateness_s"]]
    ttft_ms = [1000 * value for value in result["ttft_s"]]
    return {
        "ttft_ms_median": median(ttft_ms),
        "ttft_ms_p99": percentile(ttft_ms, 99),
        "event_ms_median": median(lateness_ms),
        "event_ms_p99": percentile(lateness_ms, 99),
        "requests_per_s": config.requests / result["elapsed_s"],
        "chunks_per_s": len(lateness_ms) / result["elapsed_s"],
        "cpu_ms_per_request": 1000 * used_s / config.requests,
        "num_failed": result["num_failed"],
    }


async def _send(rig: Rig, config: GatewayBench, words: Words, *, num_requests: int) -> dict[str, Any]:
    spec = LoadSpec(
        host="127.0.0.1",
        port=rig.port,
        prompt_ids=(),
        prompt="".join(words.texts[:NUM_PROMPT_TOKENS]),
        max_tokens=config.tokens,
        num_requests=num_requests,
        concurrency=config.concurrency,
        words=words.texts,
        model=MODEL_NAME,
    )
    # By file: thousands of words are too long for a command line.
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(dataclasses.asdict(spec), file)
        file.flush()
        output = await output_of(module("bench.load", f"@{file.name}", called="load"))
    result: dict[str, Any] = json.loads(output)
    return result


@asynccontextmanager
async def _rig(name: str, config: GatewayBench, words: Words, *, step_s: float) -> AsyncIterator[Rig]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    async with AsyncExitStack() as stack:
        if name.startswith("paceline"):
            count = 2 if name.endswith("_x2") else 1
            yield await _paceline(stack, folder, words, count=count, step_s=step_s)
            return
        port = await _openai_stub(stack, folder, words, step_s=step_s)
        yield (
            Rig(port=port) if name == DIRECT else await _smg(stack, folder, Path(config.smg), stub_port=port)
        )


async def _paceline(stack: AsyncExitStack, folder: Path, words: Words, *, count: int, step_s: float) -> Rig:
    """Two stub nodes in one process, and `count` routers on one port."""
    url = await registry(stack, folder)
    stub_config = stub_node.StubConfig(
        registry=url,
        model=MODEL_NAME,
        vocab_size=max(words.ids) + 1,
        token_ids=words.ids,
        step_s=step_s,
        tells_time=True,
    )
    stub = await stack.enter_async_context(
        running(_by_file("bench.stub_node", stub_node.command_line(stub_config), folder), folder)
    )
    port = free_port()
    options = ["--model", f"{words.folder}", "--registry", url, "--port", f"{port}", "--grpc-port", "0"]
    # On the shared port it is the system's choice which router answers: each must be asked on one of its own.
    own_ports = [free_port() for _ in range(count)]
    routers: list[Child] = []
    for index, own in enumerate(own_ports):
        arguments = (*options, "--reuse-port", "--admin-port", f"{own}")
        command = module("deploy.cli", "router", *arguments, called=f"router{index}")
        routers.append(await stack.enter_async_context(running(command, folder)))
    for own in own_ports:
        await until_ok(f"http://127.0.0.1:{own}/ready", (*routers, stub), timeout_s=READY_TIMEOUT_S)
    return Rig(port=port, gateways=tuple(routers))


async def _openai_stub(stack: AsyncExitStack, folder: Path, words: Words, *, step_s: float) -> int:
    port = free_port()
    config = stub_openai.OpenAiStubConfig(port=port, model=MODEL_NAME, words=words.texts, step_s=step_s)
    command = _by_file("bench.stub_openai", stub_openai.command_line(config), folder)
    stub = await stack.enter_async_context(running(command, folder))
    await until_ok(f"http://127.0.0.1:{port}/health", (stub,), timeout_s=READY_TIMEOUT_S)
    return port


async def _smg(stack: AsyncExitStack, folder: Path, environment: Path, *, stub_port: int) -> Rig:
    port, metrics_port = free_port(), free_port()
    arguments: Sequence[str] = (
        f"{environment}/bin/smg",
        *("launch", "--host", "127.0.0.1", "--port", f"{port}", "--prometheus-port", f"{metrics_port}"),
        *("--worker-urls", f"http://127.0.0.1:{stub_port}", "--policy", "round_robin"),
    )
    command = Command(name="smg", arguments=list(arguments), environment={})
    gateway = await stack.enter_async_context(running(command, folder))
    await until_ok(f"http://127.0.0.1:{port}/readiness", (gateway,), timeout_s=READY_TIMEOUT_S)
    return Rig(port=port, gateways=(gateway,))


def _by_file(name: str, argument: str, folder: Path) -> Command:
    path = folder / f"{name}.json"
    path.write_text(argument, encoding="utf-8")
    return module(name, f"@{path}", called=name.rpartition(".")[2])


def _medians(rounds: Sequence[Numbers]) -> Numbers:
    return {key: median(found[key] for found in rounds) for key in rounds[0]}


def _added(own: Numbers, direct: Numbers) -> Numbers:
    return {f"added_{key}": own[key] - direct[key] for key in direct if key.startswith(("ttft", "event"))}
