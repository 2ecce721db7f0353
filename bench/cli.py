"""`paceline bench`: the measuring commands.

Owns flags and their help. Must never import what measures at its top: `--help` answers at once.
"""

import asyncio
from typing import Annotated

from cyclopts import App, Parameter

from bench.config import ClusterBench
from bench.gateway_config import GatewayBench
from bench.spec_config import SpecBench
from deploy.threads import prepare

app = App(name="bench", help="Measure a cluster, or any OpenAI server.")


@app.command
def cluster(settings: Annotated[ClusterBench, Parameter(name="*")] = ClusterBench()) -> None:  # noqa: B008  frozen
    """Measure engine, KV transfer and router in one run on this machine, and other servers alongside.

    Start it on a quiet machine. Numbers are medians over interleaved rounds; both sides of every ratio ran
    next to each other.
    """
    from bench.cluster import run

    asyncio.run(run(settings))


@app.command
def gateway(settings: Annotated[GatewayBench, Parameter(name="*")] = GatewayBench()) -> None:  # noqa: B008  frozen
    """Measure what the router adds to a request and to every event, before nodes that compute nothing.

    Start it on a quiet machine. Times are counted from those of the client on a stub, without a gateway.
    """
    from bench.gateway import run

    asyncio.run(run(settings))


@app.command
def spec(settings: Annotated[SpecBench, Parameter(name="*")]) -> None:
    """Measure what drafting gains: prompts by category, one stream, each algorithm next to plain decoding."""
    prepare(settings.threads)
    from bench.spec import run

    asyncio.run(run(settings))


if __name__ == "__main__":
    app()
