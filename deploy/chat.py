"""`paceline chat`: one conversation with a running gateway.

Owns the conversation. Must never know how the answer is computed.
"""

import asyncio
import sys

from deploy.client import Answer, ChatClient
from deploy.config import ChatConfig
from deploy.terminal import Terminal


async def run(config: ChatConfig) -> None:
    """Ask the one prompt, or read questions until end of file. Raises GatewayError."""
    terminal = Terminal()
    client = ChatClient(config.url, api_key=config.api_key)
    try:
        model = await client.model()
        messages = [{"role": "system", "content": config.system}] if config.system else []
        if config.prompt:
            await ask(client, terminal, [*messages, _user(config.prompt)], config=config, model=model)
            return
        terminal.note(f"{model} at {config.url}; end of file (Ctrl-D) leaves")
        while question := await asyncio.to_thread(_read_question):
            messages.append(_user(question))
            answer = await ask(client, terminal, messages, config=config, model=model)
            messages.append({"role": "assistant", "content": answer.text})
    finally:
        await client.close()


async def ask(
    client: ChatClient,
    terminal: Terminal,
    messages: list[dict[str, str]],
    *,
    config: ChatConfig,
    model: str,
) -> Answer:
    """Stream one answer to the terminal, then its summary. Raises GatewayError."""
    answer = Answer()
    parameters = {"model": model, "max_tokens": config.max_tokens, "temperature": config.temperature}
    if config.seed is not None:
        parameters["seed"] = config.seed
    async for delta in client.stream(messages, answer, **parameters):
        terminal.delta(delta)
    terminal.line("\n")
    terminal.summary(answer)
    return answer


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _read_question() -> str:
    """The next line that is not blank; "" at the end of the input."""
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip():
            return line.strip()
