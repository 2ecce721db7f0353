"""`paceline up`: a local cluster that stays until it is told to go.

Owns the signals and what is printed. Must never know how the cluster is made.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.config import UpConfig
from deploy.local import Cluster, local_cluster
from wire.model_name import model_name

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run(config: UpConfig, file: Path | None) -> None:
    """Start it, say where it is, wait for a signal, stop it. Raises DeployError."""
    async with stop_on_signal():
        async with local_cluster(config, file=file, report=say) as cluster:
            say(where(cluster))
            await cluster.watch()
    say("stopped")


@asynccontextmanager
async def stop_on_signal() -> AsyncIterator[None]:
    """Cut the body short, cleanly, on Ctrl-C and on SIGTERM; a second signal changes nothing."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            for number in SIGNALS:
                loop.add_signal_handler(number, lambda: _expire(limit, loop))
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        say("stopping")
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def where(cluster: Cluster) -> str:
    """The URLs, and a request to copy."""
    body = json.dumps(
        {
            "model": model_name(f"{cluster.model}"),
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            "max_tokens": 64,
            "stream": True,
        }
    )
    return "\n".join(
        [
            "",
            f"  HTTP      {cluster.base_url}/v1   (also /ready, /health, /metrics)",
            f"  live page {cluster.base_url}/dashboard",
            f"  gRPC      {cluster.grpc_address}",
            f"  registry  {cluster.registry}",
            f"  logs      {cluster.log_dir}",
            "",
            f"  curl -N {cluster.base_url}/v1/chat/completions -H 'content-type: application/json' \\",
            f"    -d '{body}'",
            "",
            f"  paceline chat --url {cluster.base_url}",
            "",
            "Ctrl-C stops it.",
        ]
    )


def say(text: str) -> None:
    print(text, flush=True)


def _expire(limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
    if not limit.expired() and limit.when() is None:
        limit.reschedule(loop.time())
