"""vLLM for CPU on this machine: alone on all cores, and as a prefill/decode pair over NIXL, a core each.

Owns its command lines and when its processes run: idle vLLM servers keep the cores busy (a pair over NIXL
about two thirds of a core each), so they stand still while others are measured. Must never know what is
measured. The environment is one that `peer_vllm_cpu.sh` made; its servers are children and end with us.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import Contender, Wave, server
from bench.servers import module, running, until_ok
from deploy.local import Report
from deploy.ports import free_port
from deploy.processes import Child, Command, cores

READY_TIMEOUT_S = 400.0
MAX_MODEL_LEN = 2048
SETTLE_S = 1.0
"""Between going on and the clock's start: what was stopped catches up first."""
KV_CONFIG = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSetup:
    """`python` of the environment with vLLM; the model as a Hugging Face folder."""

    python: Path
    model: Path
    dtype: str
    folder: Path


class Paused:
    """A server whose processes run only while it answers, and again when it is to stop."""

    def __init__(self, inner: Contender, children: Sequence[Child], *, settle_s: float = SETTLE_S) -> None:
        self._inner = inner
        self._settle_s = settle_s
        self._children = tuple(children)
        self._signal(signal.SIGSTOP)

    @property
    def name(self) -> str:
        return self._inner.name

    async def answer(self, prompts: Sequence[str], *, max_tokens: int) -> Wave:
        """See `Contender.answer`."""
        self._signal(signal.SIGCONT)
        try:
            await asyncio.sleep(self._settle_s)
            return await self._inner.answer(prompts, max_tokens=max_tokens)
        finally:
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.is_running:
                os.killpg(child.pid, number)


@asynccontextmanager
async def alone(setup: VllmSetup, report: Report) -> AsyncIterator[Paused]:
    """One server on all cores."""
    port = free_port()
    command = _command(setup, "vllm", port, options=[], environment={"VLLM_CPU_KVCACHE_SPACE": "2"})
    async with running(command, setup.folder) as child:
        report("waiting for vLLM alone; it compiles for a minute or two")
        await _ready(port, child)
        paused = Paused(await server("vllm", f"http://127.0.0.1:{port}"), [child])
        try:
            yield paused
        finally:
            paused.go_on()


@asynccontextmanager
async def pair(setup: VllmSetup, report: Report) -> AsyncIterator[tuple[Paused, Paused]]:
    """The pair behind its front, and its decode server used alone: the pair's own colocated reference."""
    async with AsyncExitStack() as stack:
        ports: list[int] = []
        children: list[Child] = []
        for index, name in enumerate(("vllm-prefill", "vllm-decode")):
            ports.append(free_port())
            command = _command(
                setup,
                name,
                ports[-1],
                options=["--enforce-eager", "--kv-transfer-config", KV_CONFIG],
                environment={
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": f"{index % cores()}",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": f"{free_port()}",
                    "UCX_TLS": "tcp,self,sm",
                },
            )
            children.append(await stack.enter_async_context(running(command, setup.folder)))
        report("waiting for the vLLM pair")
        for port, child in zip(ports, children, strict=True):
            await _ready(port, child)
        front = free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        arguments = ["--prefill", urls[0], "--decode", urls[1], "--port", f"{front}"]
        proxy = module("bench.vllm_pair", *arguments, called="vllm-front")
        child = await stack.enter_async_context(running(proxy, setup.folder))
        await until_ok(f"http://127.0.0.1:{front}/v1/models", (child,), timeout_s=READY_TIMEOUT_S)
        both = await server("vllm_pair", f"http://127.0.0.1:{front}")
        colocated = await server("vllm_pair_colocated", urls[1])
        paused = Paused(both, children), Paused(colocated, children[1:])
        try:
            yield paused
        finally:
            paused[0].go_on()


async def _ready(port: int, child: Child) -> None:
    await until_ok(f"http://127.0.0.1:{port}/health", (child,), timeout_s=READY_TIMEOUT_S)


def _command(
    setup: VllmSetup, name: str, port: int, *, options: list[str], environment: dict[str, str]
) -> Command:
    # -P: our working folder holds packages of its own, which are not vLLM's business.
    arguments = [f"{setup.python}", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", f"{setup.model}", "--dtype", setup.dtype]
    arguments += ["--max-model-len", f"{MAX_MODEL_LEN}", "--host", "127.0.0.1", "--port", f"{port}"]
    return Command(
        name=name, arguments=[*arguments, *options], environment={"HF_HUB_OFFLINE": "1", **environment}
    )
