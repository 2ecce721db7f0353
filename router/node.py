"""Wires one router process: registry view, links, dispatcher, text, HTTP and gRPC.

Owns construction and shutdown, nothing else. Sockets, signals and clocks enter here.
"""

import asyncio
import importlib.metadata
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from starlette.types import ASGIApp

from router.admission import QueueConfig
from router.api_keys import ApiKeys
from router.config import RouterConfig
from router.dispatch import DispatchConfig, Dispatcher
from router.front_door import FrontDoor
from router.grpc_server import RouterGrpcServer
from router.grpc_service import GenerationService
from router.heap import settled_heap
from router.http import HttpFrontEnd, HttpOptions
from router.http_edge import by_port
from router.links import LinkConfig, NodeLinks, NodeSource
from router.listening import (
    HttpServer,
    StopSignal,
    bracketed,
    listeners_of,
    shown,
    stop_signals,
    uvicorn_config,
)
from router.openai.answers import Answers
from router.openai.chat_format import ChatFormat
from router.overview import Overview, RegistrySight
from router.pairs import PairBook, PairConfig
from router.planning import Planner
from router.prefix_index import PrefixIndex
from router.served import ServedModel
from router.stats import RouterStats
from router.text.model_text import ModelText
from router.text.parsers.catalogue import answer_format
from wire.channel import Connector
from wire.grpc_client import GrpcConnector
from wire.loop_lag import LoopLag
from wire.model_name import model_name
from wire.registry import RedisRegistry
from wire.registry_view import RegistryView
from wire.security import Trust
from wire.tracing import NO_TRACES, Tracer, tracer_for
from wire.work import new_incarnation

logger = logging.getLogger(__name__)

_GRPC_GRACE_S = 1.0
_SHOWN_SETTINGS = frozenset(
    {
        "canary_timeout_s",
        "colocated",
        "drain_timeout_s",
        "local_prompt_tokens",
        "max_attempts",
        "max_body_bytes",
        "max_in_flight",
        "min_decode",
        "min_prefill",
        "policy",
        "reasoning_parser",
        "request_timeout_s",
        "tool_call_parser",
    }
)
"""Those that are nobody's secret."""

_SHOWN_WAITING = ("max_queue", "max_queue_bytes", "max_queue_s")
"""Without other users' names, and the header a proxy is trusted with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a running router listens."""

    http_url: str
    grpc_address: str


class Nodes(NodeSource, RegistrySight, Protocol):
    """The live view of the registry."""


class Router:
    """One router without its listening sockets: what the simulation and tests build too."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        connector: Connector,
        nodes: Nodes,
        text: ModelText,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        stats = RouterStats()
        self._keys = config.access.keys(clock=time.monotonic)
        self._links = NodeLinks(
            nodes,
            connector=connector,
            router=new_incarnation(),
            stats=stats,
            config=LinkConfig(),
            index=PrefixIndex(on_size=stats.prefix_pages) if _wants_index(config) else None,
        )
        self._pairs = PairBook(self._links, stats=stats, new_id=_new_id, config=_pair_config(config))
        self.dispatcher = Dispatcher(
            self._links,
            self._pairs,
            stats=stats,
            config=_dispatch_config(config, self._keys),
            new_id=_new_id,
            tracer=tracer,
        )
        self._served = ServedModel(
            alias=config.served_model_name, default=model_name(config.model), text=text, nodes=nodes
        )
        self._door = FrontDoor(
            self.dispatcher,
            text=text,
            served=self._served,
            planner=Planner(mint_seed=lambda: secrets.randbits(64)),
            clock=lambda: asyncio.get_running_loop().time(),
        )
        self._chat_format = ChatFormat(
            text.tokenizer,
            new_id=_new_id,
            answer_format=answer_format(
                tool_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
                template=text.template_source,
            ),
        )
        self._lag = LoopLag()
        self._overview = Overview(
            work=self.dispatcher,
            pairs=self._pairs,
            stats=stats,
            nodes=nodes,
            lag=self._lag,
            model=lambda: self._served.name,
            settings=shown_settings(config),
        )
        self._config = config

    async def run(self) -> None:
        """Follow the nodes and prove pairs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._links.run())
            group.create_task(self._pairs.run())
            group.create_task(self._lag.run())

    def http(self, *, has_admin: bool = True) -> ASGIApp:
        """The ASGI application, with or without the pages for operators."""
        options = HttpOptions(
            version=_version(),
            max_body_bytes=self._config.max_body_bytes,
            tenant_header=self._config.waiting.tenant_header,
        )
        answers = Answers(self._door, new_id=_new_id, wall_clock=time.time, chat_format=self._chat_format)
        front = HttpFrontEnd(
            answers,
            keys=self._keys,
            served=self._served,
            operations=self._overview,
            options=options,
            created=int(time.time()),
        )
        return front.app(_new_id, has_admin=has_admin)

    def grpc(self) -> GenerationService:
        """The servicer of `Generation`."""
        return GenerationService(
            self._door,
            new_id=_new_id,
            keys=self._keys,
            chat_format=self._chat_format,
            tenant_header=self._config.waiting.tenant_header,
        )


async def run(config: RouterConfig, *, on_listening: Callable[[Listening], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then refuse what is new, finish what runs, and return.

    Raises ValueError for a model folder without tokenizer, OSError when a port is taken.
    """
    config.access.check_certificate()
    text = ModelText.from_folder(_folder(config), local_time=lambda: datetime.now().astimezone())
    tracer = tracer_for(
        config.monitoring.otlp_endpoint,
        service="paceline-router",
        instance=f"{config.host}:{config.port}",
        wall_offset_s=time.time() - asyncio.get_running_loop().time(),
    )
    try:
        async with (
            RedisRegistry(config.registry) as registry,
            GrpcConnector(Trust(config.security)) as connector,
            asyncio.TaskGroup() as group,
        ):
            nodes = RegistryView(registry)
            router = Router(config, connector=connector, nodes=nodes, text=text, tracer=tracer)
            tasks = [group.create_task(nodes.run()), group.create_task(router.run())]
            with settled_heap():
                await _serve(router, config, on_listening)
            for task in tasks:
                task.cancel()
    finally:
        text.close()
        if tracer is not NO_TRACES:
            await asyncio.to_thread(tracer.close)


async def _serve(
    router: Router, config: RouterConfig, on_listening: Callable[[Listening], None] | None
) -> None:
    """Listen, wait for the signal, drain, stop listening."""
    with stop_signals() as stop, listeners_of(config) as listeners:
        rpc = RouterGrpcServer(
            router.grpc(),
            f"{bracketed(config.host)}:{config.grpc_port}",
            credentials=config.access.grpc_credentials(),
            reuse_port=config.reuse_port,
        )
        await rpc.start()
        http = HttpServer(uvicorn_config(_app(router, config), config.access))
        listening = Listening(
            http_url=f"{config.access.scheme}://{shown(config.host)}:{listeners[0].getsockname()[1]}",
            grpc_address=f"{shown(config.host)}:{rpc.port}",
        )
        logger.info("listening on %s and grpc://%s", listening.http_url, listening.grpc_address)
        if on_listening is not None:
            on_listening(listening)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(http.serve(sockets=listeners))
            stopped = group.create_task(stop.wait())
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            await rpc.drain()
            await _drain(router, stop, timeout_s=config.drain_timeout_s)
            stopped.cancel()
            http.should_exit = True
            await rpc.stop(_GRPC_GRACE_S)


async def _drain(router: Router, stop: StopSignal, *, timeout_s: float) -> None:
    """Wait for what runs, but not after a second signal or the time is up."""
    logger.info("draining: %d requests in flight", router.dispatcher.num_in_flight)
    drained = asyncio.ensure_future(router.dispatcher.drain())
    hurried = asyncio.ensure_future(stop.wait_again())
    try:
        await asyncio.wait((drained, hurried), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        drained.cancel()
        hurried.cancel()


def _app(router: Router, config: RouterConfig) -> ASGIApp:
    """With a port for operators, only that one has their pages."""
    port = config.monitoring.admin_port
    if not port:
        return router.http()
    return by_port({port: router.http()}, otherwise=router.http(has_admin=False))


def shown_settings(config: RouterConfig) -> dict[str, Any]:
    """What every user may know of a router's settings."""
    settings = asdict(config)
    waiting = {name: settings["waiting"][name] for name in _SHOWN_WAITING}
    return {name: settings[name] for name in sorted(_SHOWN_SETTINGS)} | {"waiting": waiting}


def _folder(config: RouterConfig) -> Path:
    """A .gguf file stands for the folder it lies in."""
    path = Path(config.model).expanduser()
    return path.parent if path.is_file() else path


def _pair_config(config: RouterConfig) -> PairConfig:
    return PairConfig(
        with_prefill=not config.colocated,
        with_local=config.colocated or config.local_prompt_tokens > 0,
        min_prefill=config.min_prefill,
        min_decode=config.min_decode,
        canary_timeout_s=config.canary_timeout_s,
    )


def _wants_index(config: RouterConfig) -> bool:
    """Nodes tell of their cached pages only where somebody looks at them."""
    return config.policy == "prefix" or config.local_prompt_tokens > 0


def _dispatch_config(config: RouterConfig, keys: ApiKeys) -> DispatchConfig:
    return DispatchConfig(
        policy=config.policy,
        policy_seed=config.policy_seed,
        colocated=config.colocated,
        local_prompt_tokens=config.local_prompt_tokens,
        queue=QueueConfig(
            max_in_flight=config.max_in_flight,
            max_queue=config.waiting.max_queue,
            max_queue_bytes=config.waiting.max_queue_bytes,
            max_queue_s=config.waiting.max_queue_s,
            weights=config.waiting.weights(keys.weights),
        ),
        max_attempts=config.max_attempts,
        default_deadline_s=config.request_timeout_s,
    )


def _new_id() -> str:
    return uuid.uuid4().hex


def _version() -> str:
    try:
        return importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
