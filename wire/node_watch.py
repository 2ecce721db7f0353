"""What a node shows of itself over HTTP: /metrics for Prometheus, /health and /ready for whoever restarts it.

Owns the pages and the measuring of the event loop. Must never know what a core does.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Protocol

from wire.host_events import NodeStatus
from wire.loop_lag import LoopLag
from wire.metric import CONTENT_TYPE
from wire.metrics_server import MetricsServer, Page
from wire.node_metrics import NodeReading, node_text
from wire.records import NodeRecord

_STATUS_TIMEOUT_S = 2.0


class WatchedNode(Protocol):
    """What is asked of a node; `wire.host.NodeHost` is one."""

    @property
    def record(self) -> NodeRecord: ...

    async def status(self) -> NodeStatus: ...

    @property
    def last_status(self) -> NodeStatus | None:
        """As of the last heartbeat."""
        ...


class NodeWatch:
    """`port` is the bound one; None: this node shows nothing."""

    def __init__(self, server: MetricsServer | None, *, num_refused: Callable[[], int]) -> None:
        self._server = server
        self._num_refused = num_refused
        self._lag = LoopLag()

    @classmethod
    def listening(cls, *, host: str, port: int, num_refused: Callable[[], int] = lambda: 0) -> "NodeWatch":
        """Port 0 takes a free one, -1 none. `num_refused`: calls turned away at the door.

        Raises OSError when it cannot bind.
        """
        return cls(None if port < 0 else MetricsServer(host=host, port=port), num_refused=num_refused)

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port

    async def run(self, node: WatchedNode) -> None:
        """Measure, and serve the pages, until cancelled."""
        if self._server is not None:

            async def metrics() -> Page:
                return await self._metrics(node)

            async def health() -> Page:
                return Page(body=b'{"status":"ok"}')

            async def ready() -> Page:
                return _ready(node.record)

            await self._server.start({"/metrics": metrics, "/health": health, "/ready": ready})
        await self._lag.run()

    async def stop(self) -> None:
        """Stop serving. Idempotent."""
        if self._server is not None:
            await self._server.stop()

    async def _metrics(self, node: WatchedNode) -> Page:
        """A node that computes one long step answers with what it last said of itself."""
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                status: NodeStatus | None = await node.status()
        except TimeoutError:
            status = node.last_status
        if status is None:
            return Page(body=b'{"error":"the engine has not answered yet"}', status=503)
        more = {"calls_refused": float(self._num_refused())}
        reading = NodeReading(record=node.record, status=status, lag=self._lag.read(), more=more)
        return Page(body=node_text(reading), content_type=CONTENT_TYPE)


def _ready(record: NodeRecord) -> Page:
    status = "draining" if record.is_draining else "ok"
    body = json.dumps({"status": status, "role": record.role, "model": record.model}).encode()
    return Page(body=body, status=503 if record.is_draining else 200)
