"""`python -m decode_node`: one decode node; `paceline decode` adds environment and configuration file."""

import asyncio
from typing import Annotated

import uvloop
from cyclopts import App, Parameter

from decode_node.config import DecodeConfig
from decode_node.node import run
from wire.logs import set_up

app = App(name="decode_node", help="Run one decode node.")


@app.default
def main(settings: Annotated[DecodeConfig, Parameter(name="*")]) -> None:
    """Serve until SIGTERM or SIGINT."""
    set_up(level=settings.monitoring.log_level, log_format=settings.monitoring.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings))


if __name__ == "__main__":
    app()
