"""`python -m prefill_node`: one prefill node; `paceline prefill` adds environment and configuration file."""

import asyncio
from typing import Annotated

import uvloop
from cyclopts import App, Parameter

from prefill_node.config import PrefillConfig
from prefill_node.node import run
from wire.logs import set_up

app = App(name="prefill_node", help="Run one prefill node.")


@app.default
def main(settings: Annotated[PrefillConfig, Parameter(name="*")]) -> None:
    """Serve until SIGTERM or SIGINT."""
    set_up(level=settings.monitoring.log_level, log_format=settings.monitoring.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings))


if __name__ == "__main__":
    app()
