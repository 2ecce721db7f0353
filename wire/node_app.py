"""A node as a process: server, transports, engine thread, registry, signals. The same for both roles.

Owns the order of starting and stopping. Must never know what the core does with what it is handed.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from engine.thread import StepThread
from kv_transfer.ids import Incarnation, TransferId, new_incarnation
from kv_transfer.peers import PeerTable
from kv_transfer.transports.registry import AUTO, BACKENDS, Built, Setup, build, choose, unusable
from wire.grpc_client import GrpcConnector
from wire.grpc_server import GrpcServer
from wire.host import HostConfig, NodeHost
from wire.host_events import NodeCore
from wire.intake import Intake
from wire.node_config import NodeConfig, advertised_address
from wire.node_facts import NodeFacts, hello_of, record_of
from wire.node_spans import NodeSpans
from wire.node_watch import NodeWatch
from wire.peering import PeerSearch
from wire.records import NodeRecord
from wire.registry import RedisRegistry
from wire.registry_view import RegistryView
from wire.security import Trust
from wire.tracing import tracer_for

logger = logging.getLogger(__name__)

MayWrite = Callable[[Incarnation, TransferId, tuple[int, ...]], bool]


class EngineCrashed(RuntimeError):
    """The core raised: a node that cannot step is dead, and its process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """What a role's core is built from besides its engine."""

    peers: PeerTable
    intake: Intake
    clock: Callable[[], float]  # the engine thread's


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """How one role differs: its core, and which peers it opens sessions to (None: it waits for them)."""

    build_core: Callable[[CoreParts], NodeCore]
    wants: Callable[[NodeRecord], bool] | None
    may_write: MayWrite | None
    allow_seedless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doors:
    """Where a node can be reached."""

    server: GrpcServer
    watch: NodeWatch
    trust: Trust
    spans: NodeSpans | None


async def serve_node(config: NodeConfig, facts: NodeFacts, role: Role) -> None:
    """Run until SIGTERM or SIGINT, then drain and return. Raises EngineCrashed when the core died."""
    trust = Trust(config.security)
    server = GrpcServer(f"{config.host}:{config.port}", trust)
    watch = NodeWatch.listening(
        host=config.host, port=config.monitoring.metrics_port, num_refused=lambda: trust.num_refused
    )
    address = advertised_address(config, server.port)
    incarnation = new_incarnation()
    setup = Setup(
        incarnation=incarnation,
        address=address,
        may_write=role.may_write,
        dial=trust.channel,
        metadata=trust.metadata,
    )
    transports = [build(name, setup) for name in _transport_names(config.transport)]
    for built in transports:
        built.transport.register(facts.memory)
        built.attach(asyncio.get_running_loop())
        server.add_handlers(_handlers(built))
    names = tuple(built.transport.name for built in transports)
    peers = PeerTable(
        ours=hello_of(incarnation, config, facts, transports=names, allow_seedless=role.allow_seedless),
        transports={built.transport.name: built.transport for built in transports},
        is_decode=role.may_write is not None,
    )
    intake = Intake(limits=facts.limits, max_waiting=config.max_waiting)
    core = role.build_core(CoreParts(peers=peers, intake=intake, clock=time.monotonic))
    record = record_of(
        incarnation,
        address,
        facts,
        transports=names,
        metrics_port=watch.port,
        started_at=time.time(),
    )
    spans = _spans(config, record)
    doors = _Doors(server=server, watch=watch, trust=trust, spans=spans)
    try:
        await _serve(config, record, core, role=role, doors=doors)
    finally:
        if spans is not None:
            await asyncio.to_thread(spans.close)
        await server.stop()
        await watch.stop()
        peers.close()


async def _serve(
    config: NodeConfig, record: NodeRecord, core: NodeCore, *, role: Role, doors: "_Doors"
) -> None:
    server = doors.server
    crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    thread = StepThread(core, on_crash=crashed.set_result)
    async with RedisRegistry(config.registry) as registry, GrpcConnector(doors.trust) as connector:
        search = None
        if role.wants is not None:
            search = PeerSearch(connector=connector, view=RegistryView(registry), wants=role.wants)
        host = NodeHost(
            record=record,
            driver=thread,
            registry=registry,
            search=search,
            config=HostConfig(drain_timeout_s=config.drain_timeout_s),
            spans=doors.spans,
        )
        thread.start()
        await server.start(host)
        logger.info(
            "%s node %s serves %s at %s", record.role, record.incarnation, record.model, record.address
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(host.run())
            watching = group.create_task(doors.watch.run(host))
            stopping = group.create_task(_stop_on_signal(host, server))
            await asyncio.wait((running, crashed), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            watching.cancel()
            if crashed.done():
                running.cancel()
                raise EngineCrashed("the engine thread died") from crashed.result()
    await thread.stop()


def _spans(config: NodeConfig, record: NodeRecord) -> NodeSpans | None:
    """None unless a collector is named."""
    endpoint = config.monitoring.otlp_endpoint
    if not endpoint:
        return None
    clock = asyncio.get_running_loop().time
    tracer = tracer_for(
        endpoint,
        service=f"paceline-{record.role}",
        instance=record.address,
        wall_offset_s=time.time() - clock(),
    )
    return NodeSpans(role=record.role, tracer=tracer, clock=clock)


async def _stop_on_signal(host: NodeHost, server: GrpcServer) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    await asked.wait()
    logger.info("stopping: draining")
    await server.set_healthy(False)
    await asyncio.shield(host.stop())


def _transport_names(wanted: str) -> list[str]:
    """The data planes to offer, best first; what cannot be offered is said once."""
    if wanted != AUTO:
        return [choose(wanted).name]
    choice = choose(AUTO)
    if choice.degraded:
        logger.warning("transport %s instead of the preferred one: %s", choice.name, choice.degraded)
    return [name for name in BACKENDS if not unusable(name)]


def _handlers(built: Built) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
    handlers = built.rpc_handlers
    assert all(isinstance(handler, grpc.GenericRpcHandler) for handler in handlers)
    return tuple(handler for handler in handlers if isinstance(handler, grpc.GenericRpcHandler))
