"""`make demo`: a cluster, one answer streamed to the terminal, its summary, and everything gone again.

Owns the story. The pieces are those of `paceline up` and `paceline chat`.
"""

import argparse
import asyncio
import sys

from deploy.chat import ask
from deploy.client import ChatClient
from deploy.config import DEMO_ALGORITHM, ChatConfig, UpConfig
from deploy.errors import DeployError
from deploy.local import local_cluster
from deploy.terminal import Terminal
from deploy.up import stop_on_signal

PROMPT = "Write a Python function fibonacci(n) that returns the first n Fibonacci numbers, and call it."


async def run(prompt: str, *, max_tokens: int) -> None:
    """The whole demonstration. Raises DeployError."""
    terminal = Terminal()
    async with stop_on_signal():
        config = UpConfig(port=0, grpc_port=0, algorithm=DEMO_ALGORITHM)
        async with local_cluster(config, report=terminal.note) as cluster:
            client = ChatClient(cluster.base_url)
            try:
                terminal.line(f"\n> {prompt}\n")
                await ask(
                    client,
                    terminal,
                    [{"role": "user", "content": prompt}],
                    config=ChatConfig(url=cluster.base_url, max_tokens=max_tokens),
                    model=await client.model(),
                )
            finally:
                await client.close()
    terminal.note("\nstopped; `make up` keeps a cluster running")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    try:
        asyncio.run(run(options.prompt, max_tokens=options.max_tokens))
    except DeployError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
