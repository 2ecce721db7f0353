"""`python -m router`: the router on its own; `paceline router` adds environment and configuration file."""

import asyncio
from typing import Annotated

import uvloop
from cyclopts import App, Parameter

from router.config import RouterConfig
from router.node import run
from wire.logs import set_up

app = App(name="router", help="Run one router: text in, text out, over HTTP and gRPC.")


@app.default
def main(settings: Annotated[RouterConfig, Parameter(name="*")]) -> None:
    """Serve until SIGTERM or SIGINT."""
    set_up(level=settings.monitoring.log_level, log_format=settings.monitoring.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings))


if __name__ == "__main__":
    app()
