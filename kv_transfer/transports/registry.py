"""Which data planes exist between processes, which of them works here, and how one is built.

Owns the catalogue. A backend's module is loaded when it is chosen, because its library may be missing.
`memory` is not in it: it joins nodes of one process and is wired by whoever owns the fabric.
"""

import asyncio
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import grpc
import grpc.aio

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.transport import Transport, TransportError

AUTO = "auto"


Dial = Callable[[str, Sequence[tuple[str, int]]], grpc.aio.Channel]


def plain_channel(address: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a node gives its transport. `may_write` None: this node never receives pages.

    dial: opens a connection to a peer; calls on it carry `metadata`, by which the peer knows us.
    """

    incarnation: Incarnation
    address: str  # host:port of this node's gRPC server, as peers reach it
    may_write: Callable[[Incarnation, TransferId, tuple[int, ...]], bool] | None
    dial: Dial = plain_channel
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A transport with its two hooks into the node's asyncio side; both may do nothing."""

    transport: Transport
    attach: Callable[[asyncio.AbstractEventLoop], None]  # before the first connect
    rpc_handlers: tuple[object, ...]  # grpc.GenericRpcHandler, for the node's grpc.aio server


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The transport a node uses. `degraded` says why it is not the preferred one; empty when it is."""

    name: str
    degraded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backend:
    module: str  # has `create(setup: Setup) -> Built`
    library: str


BACKENDS: Mapping[str, _Backend] = MappingProxyType(
    {
        "nixl": _Backend(module="kv_transfer.transports.nixl", library="nixl"),
        "grpc": _Backend(module="kv_transfer.transports.grpc", library="grpc"),
    }
)
"""In order of preference."""


def unusable(name: str) -> str:
    """Why this backend cannot work here; empty when it can."""
    backend = BACKENDS[name]
    if importlib.util.find_spec(backend.library) is None:
        return f"{backend.library} not installed"
    try:
        importlib.import_module(backend.module)
    except ImportError as error:
        return f"{backend.library} does not load: {error}"
    return ""


def choose(wanted: str, *, probe: Callable[[str], str] = unusable) -> Choice:
    """Resolve `auto` to the best transport that works here; check a named one.

    Raises ValueError for an unknown name, TransportError with the reason when a named one cannot work.
    """
    if wanted != AUTO and wanted not in BACKENDS:
        raise ValueError(f"transport must be one of {[AUTO, *BACKENDS]}, got {wanted!r}")
    reasons: list[str] = []
    for name in BACKENDS if wanted == AUTO else (wanted,):
        reason = probe(name)
        if not reason:
            return Choice(name=name, degraded="; ".join(reasons))
        reasons.append(reason)
    raise TransportError(f"transport {wanted}: {'; '.join(reasons)}")


def build(name: str, setup: Setup) -> Built:
    """A transport by the name that `choose` returned."""
    create: Callable[[Setup], Built] = vars(importlib.import_module(BACKENDS[name].module))["create"]
    return create(setup)
