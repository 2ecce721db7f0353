"""Who can be measured: anything that answers one prompt, or several at once.

Owns the seam between measuring and answering. Must never know the schedule or the report.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.openai import Completion, OpenAi
from bench.servers import MeasurementFailed, module
from deploy.processes import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Prompts sent at the same moment and all their answers; `elapsed_s` until the last one ended."""

    elapsed_s: float
    answers: tuple[Completion, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens by wall time, prompt processing included: what a user waits for."""
        return sum(answer.num_output_tokens for answer in self.answers) / self.elapsed_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens after each first one, by the time from the first of them all to the last."""
        after = sum(answer.num_output_tokens - 1 for answer in self.answers)
        return after / max(self.elapsed_s - min(answer.ttft_s for answer in self.answers), 1e-9)


class Contender(Protocol):
    """One way to get answers."""

    @property
    def name(self) -> str: ...

    async def answer(self, prompts: Sequence[str], *, max_tokens: int) -> Wave:
        """All prompts at once. Raises DeployError."""
        ...


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI server."""

    name: str
    client: OpenAi
    model: str

    async def answer(self, prompts: Sequence[str], *, max_tokens: int) -> Wave:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.client.complete(prompt, model=self.model, max_tokens=max_tokens))
                for prompt in prompts
            ]
        elapsed_s = time.perf_counter() - started
        return Wave(elapsed_s=elapsed_s, answers=tuple(task.result() for task in tasks))


async def server(name: str, url: str, *, api_key: str = "") -> Server:
    """A running server, asked for its model's name. Raises GatewayError."""
    client = OpenAi(url, api_key=api_key)
    return Server(name, client, await client.model())


class Transformers:
    """`transformers.generate` in a process of its own: one JSON line in, one out."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    async def answer(self, prompts: Sequence[str], *, max_tokens: int) -> Wave:
        reply = await self._ask({"prompts": list(prompts), "max_tokens": max_tokens})
        answers = tuple(
            Completion(
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=max_tokens,
                ttft_s=reply["ttft_s"],
                total_s=reply["total_s"],
            )
            for num_prompt_tokens in reply["num_prompt_tokens"]
        )
        return Wave(elapsed_s=reply["total_s"], answers=answers)

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self.read()

    async def read(self) -> dict[str, Any]:
        """The worker's next line. Raises MeasurementFailed when it ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise MeasurementFailed("the transformers process ended; its errors are above")
        reply: dict[str, Any] = json.loads(line)
        return reply


@asynccontextmanager
async def transformers(
    name: str, model: Path, *, dtype: str, threads: int, environment: Mapping[str, str]
) -> AsyncIterator[Transformers]:
    """The worker, loaded and idle, for the length of a block. `environment` is added to ours."""
    command: Command = module("bench.transformers_worker", f"{model}", dtype, f"{threads}")
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        env={**os.environ, **environment},
    )
    try:
        worker = Transformers(name, process)
        await worker.read()
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
