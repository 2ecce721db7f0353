"""The `paceline` command: one sub-command per process, and the tools around them.

Owns flags and their help. Must never import torch or a server at its top: `--help` answers at once,
and a router host has no torch.
"""

import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from decode_node.config import DecodeConfig
from deploy.config import ChatConfig, UpConfig
from deploy.errors import DeployError
from deploy.settings import CONFIG_FLAG, PREFIX, Environment, File
from deploy.threads import prepare
from prefill_node.config import PrefillConfig
from router.config import RouterConfig
from wire.logs import LogFormat, LogLevel, set_up

TABLES = frozenset({"prefill", "decode", "router", "up", "chat", "bench"})
Flat = Parameter(name="*")
ConfigFile = Annotated[Path | None, Parameter(name=CONFIG_FLAG)]

app = App(
    name="paceline",
    help=(
        "Serve a language model from prefill nodes, decode nodes and a router.\n\n"
        "Every flag of a command is also an environment variable and a key in the command's table of a "
        "TOML file (--config FILE): --page-size, PACELINE_DECODE_PAGE_SIZE, page_size in [decode]. "
        "A flag wins over the environment, the environment over the file, the file over the default."
    ),
    version_flags=["--version"],
    config=[Environment(PREFIX), File(TABLES)],
)
app.command("bench.cli:app", name="bench", help="Measure a cluster, or any OpenAI server.")


@app.command
def prefill(settings: Annotated[PrefillConfig, Flat], *, config: ConfigFile = None) -> None:
    """Run one prefill node: it computes prompts and hands their KV pages to decode nodes.

    Parameters
    ----------
    config
        TOML file; this command reads its table [prefill].
    """
    prepare(settings.threads)
    from prefill_node.node import run

    serve(run(settings), log_level=settings.monitoring.log_level, log_format=settings.monitoring.log_format)


@app.command
def decode(settings: Annotated[DecodeConfig, Flat], *, config: ConfigFile = None) -> None:
    """Run one decode node: it drafts, verifies and emits the tokens.

    Parameters
    ----------
    config
        TOML file; this command reads its table [decode].
    """
    prepare(settings.threads)
    from decode_node.node import run

    serve(run(settings), log_level=settings.monitoring.log_level, log_format=settings.monitoring.log_format)


@app.command
def router(settings: Annotated[RouterConfig, Flat], *, config: ConfigFile = None) -> None:
    """Run one router: text in, text out, over HTTP and gRPC.

    Parameters
    ----------
    config
        TOML file; this command reads its table [router].
    """
    from router.node import run

    serve(run(settings), log_level=settings.monitoring.log_level, log_format=settings.monitoring.log_format)


@app.command
def up(settings: Annotated[UpConfig, Flat] = UpConfig(), *, config: ConfigFile = None) -> None:
    """Start a whole cluster on this machine and keep it until Ctrl-C.

    Parameters
    ----------
    config
        TOML file; this command reads its table [up] and hands the file on to every process.
    """
    from deploy.up import run

    asyncio.run(run(settings, config))


@app.command
def chat(settings: Annotated[ChatConfig, Flat] = ChatConfig(), *, config: ConfigFile = None) -> None:
    """Talk to a running gateway; accepted draft tokens are shown in colour.

    Parameters
    ----------
    config
        TOML file; this command reads its table [chat].
    """
    from deploy.chat import run

    asyncio.run(run(settings))


@app.command
def key(name: str) -> None:
    """Make an API key: shown once, with the entry of the router's api_keys_file that lets it in.

    Parameters
    ----------
    name
        Whose key it is.
    """
    from router.api_keys import digest, new_key

    made = new_key()
    print(f"# give this to {name} and do not store it: {made}", file=sys.stderr)
    print(f'[[keys]]\nname = {json.dumps(name)}\nsha256 = "{digest(made)}"')


@app.command
def convert(gguf: Path, folder: Path) -> None:
    """Turn a .gguf file into a Hugging Face folder (config, tokenizer, safetensors).

    Parameters
    ----------
    gguf
        The file to read.
    folder
        The folder to write; it must not exist.
    """
    from deploy.models import convert

    convert(gguf, folder)


def serve(process: Coroutine[Any, Any, None], *, log_level: LogLevel, log_format: LogFormat) -> None:
    """Run one process of the cluster to its end, on uvloop where there is one."""
    set_up(level=log_level, log_format=log_format)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(process)


def main() -> None:
    """Entry point. What the user got wrong ends in one line and status 2, what failed in one and 1."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, DeployError, OSError, ExceptionGroup) as error:
        cause = _only_cause(error)
        if not isinstance(cause, ValueError | DeployError | OSError):
            raise
        print(f"paceline: {cause}", file=sys.stderr)
        sys.exit(2 if isinstance(cause, ValueError) else 1)


def _only_cause(error: Exception) -> Exception:
    """The one error inside nested task groups; the group where there are several."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
