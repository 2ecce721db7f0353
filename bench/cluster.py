"""One run of `paceline bench cluster`: starts who is measured, measures, and writes table, JSON and plot.

Owns the order of the parts and what runs at the same time. Must never know how a number is shown.
"""

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench import engine_report, plot, prompts, router, schedule, table, transfer, vllm
from bench.config import ClusterBench
from bench.contenders import Contender, server, transformers
from bench.machine import facts
from bench.stats import rounded
from deploy import models
from deploy.config import UpConfig
from deploy.local import local_cluster
from deploy.processes import cores
from deploy.threads import thread_environment
from deploy.up import say, stop_on_signal
from router.text.tokenizer import Tokenizer

CLUSTERS: dict[str, dict[str, Any]] = {
    "colocated": {"prefill": 0},
    "pair_nixl": {"prefill": 1, "transport": "nixl"},
    "pair_grpc": {"prefill": 1, "transport": "grpc"},
}

TRANSFER_PAGES = (64, 256)


async def run(config: ClusterBench) -> None:
    """Measure what the settings ask for. Raises DeployError, ValueError."""
    async with stop_on_signal():
        model = models.resolve(config.model, report=say)
        result: dict[str, Any] = {"machine": facts(), "settings": dataclasses.asdict(config)}
        del result["settings"]["api_key"]
        if config.has("transfer"):
            result |= await _transfers()
        if config.has("router"):
            bench = router.RouterBench(num_requests=config.router_requests)
            result["router"] = await router.measure(_folder(model), bench, report=say)
        if config.has("engine"):
            result |= await _engines(config, model)
        _write(config, _rounded(result))


async def _transfers() -> dict[str, Any]:
    """Each transport, scattered pages against one contiguous NIXL write."""
    speeds: dict[str, dict[str, Any]] = {}
    for name in ("nixl", "grpc"):
        for num_pages in TRANSFER_PAGES:
            say(f"KV transfer: {name}, {num_pages} pages")
            speed = await asyncio.to_thread(transfer.measure, name, num_pages=num_pages)
            speeds.setdefault(name, {})[str(num_pages)] = {
                "gb_per_s": speed.gb_per_s,
                "raw_gb_per_s": speed.raw_gb_per_s,
                "transfer_over_raw": speed.transfer_over_raw,
                "transfer_over_raw_range": speed.transfer_over_raw_range,
                "page_bytes": speed.page_bytes,
            }
    ratios = {pages: value["transfer_over_raw"] for pages, value in speeds["nixl"].items()}
    return {"transfer": speeds, "transfer_over_raw": ratios}


async def _engines(config: ClusterBench, model: Path) -> dict[str, Any]:
    """Every algorithm with all contenders next to each other, servers of others included."""
    tokenizer = Tokenizer.from_folder(_folder(model))
    plan = schedule.Plan(
        prompts=prompts.load(Path(config.prompts) if config.prompts else None),
        streams=config.streams,
        max_tokens=config.max_tokens,
        rounds=config.rounds,
        long_prompt=lambda n: prompts.of_length(tokenizer, config.long_prompt_tokens, seed=n),
    )
    phases: dict[str, Any] = {}
    async with _others(config, model, has_folder=_folder(model) == model) as others:
        for algorithm in config.algorithm_names:
            say(f"engine: {algorithm}")
            async with _ours(config, algorithm) as ours:
                samples = await schedule.run([*ours, *others], plan, report=say)
            phases[algorithm] = engine_report.phase(samples)
    return engine_report.sections(phases)


@asynccontextmanager
async def _ours(config: ClusterBench, algorithm: str) -> AsyncIterator[list[Contender]]:
    """Our clusters, all up at once; the idle ones wait without using the cores."""
    async with AsyncExitStack() as stack:
        contenders: list[Contender] = []
        for name in config.cluster_names:
            settings = UpConfig(
                model=config.model,
                port=0,
                grpc_port=0,
                dtype=config.dtype,
                algorithm=algorithm,
                threads=config.threads or cores(),
                **CLUSTERS[name],
            )
            say(f"starting {name}")
            running = await stack.enter_async_context(local_cluster(settings, report=_quiet))
            contenders.append(await server(name, running.base_url))
        yield contenders


@asynccontextmanager
async def _others(config: ClusterBench, model: Path, *, has_folder: bool) -> AsyncIterator[list[Contender]]:
    """`transformers`, the server at --against, and vLLM, each if wanted and possible."""
    async with AsyncExitStack() as stack:
        threads = config.threads or cores()
        contenders: list[Contender] = []
        if has_folder:
            # Spinning threads are fastest on idle cores and collapse on busy ones: it runs both ways.
            for name, environment in (
                ("transformers", {}),
                ("transformers_passive", thread_environment(threads)),
            ):
                worker = transformers(
                    name, model, dtype=config.dtype, threads=threads, environment=environment
                )
                contenders.append(await stack.enter_async_context(worker))
        if config.against:
            contenders.append(await server("against", config.against, api_key=config.api_key))
        if config.vllm:
            setup = vllm.VllmSetup(
                python=Path(config.vllm, "bin", "python"),
                model=model,
                dtype=config.dtype,
                folder=Path(tempfile.mkdtemp(prefix="paceline-bench-")),
            )
            contenders.append(await stack.enter_async_context(vllm.alone(setup, say)))
            contenders += await stack.enter_async_context(vllm.pair(setup, say))
        yield contenders


def _write(config: ClusterBench, result: dict[str, Any]) -> None:
    say(table.text(result))
    if config.json:
        path = Path(config.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        say(f"numbers: {path}")
    image = config.plot or (str(Path(config.json).with_suffix(".png")) if config.json else "")
    if image:
        say(plot.draw(result, Path(image)))


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return rounded(value)
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list():
            return [_rounded(item) for item in value]
    return value


def _folder(model: Path) -> Path:
    return model.parent if model.is_file() else model


def _quiet(_text: str) -> None:
    """What a cluster says while it starts is in its logs."""
