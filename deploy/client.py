"""Streams one chat answer from a gateway: server-sent events in, deltas and a summary out.

Owns the wire format as a client sees it. Must never know how anything is shown.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.errors import GatewayError

DEBUG_HEADER = "x-paceline-debug"
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "::1"})
_PER_CHUNK = frozenset({"accepted", "accepted_chars", "ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text; its first `accepted_chars` are accepted drafts (0 where the server does not tell)."""

    text: str
    accepted_chars: int = 0


@dataclass(slots=True, kw_only=True)
class Answer:
    """What is known of an answer once its stream has ended. Seconds are measured here."""

    text: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    """What Paceline adds to the last chunk: kv_bytes, transport, speculative_decoding and more."""

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token."""
        decoding_s = self.total_s - self.ttft_s
        return (self.num_output_tokens - 1) / decoding_s if decoding_s > 0 else 0.0

    @property
    def speculation(self) -> dict[str, Any]:
        """Counts of drafting and verifying; empty when not told."""
        return dict(self.details.get("speculative_decoding", {}))


class ChatClient:
    """Talks to one gateway, named with or without the /v1 of its API. Close it when done."""

    def __init__(
        self, url: str, *, api_key: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        self._http = httpx.AsyncClient(
            base_url=base,
            timeout=httpx.Timeout(600.0, connect=5.0),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=base.host not in _THIS_HOST,  # no proxy leads here
        )
        self._clock = clock

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Name of the first model the gateway offers. Raises GatewayError."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise GatewayError(f"no gateway at {self._http.base_url}: {error}") from error
        models = response.json().get("data", []) if response.is_success else []
        if not models:
            raise GatewayError(f"{self._http.base_url} offers no model: {response.text[:200]}")
        return str(models[0]["id"])

    async def stream(
        self, messages: Sequence[Mapping[str, str]], answer: Answer, **parameters: Any
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one answer and fill `answer`. Raises GatewayError."""
        body = {
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        started = self._clock()
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", json=body, headers={DEBUG_HEADER: "1"}
            ) as response:
                if not response.is_success:
                    raise GatewayError(_reason(await response.aread(), response.status_code))
                async for line in response.aiter_lines():
                    for delta in _take(line, answer):
                        answer.ttft_s = answer.ttft_s or self._clock() - started
                        answer.text += delta.text
                        yield delta
        except httpx.HTTPError as error:
            raise GatewayError(f"{self._http.base_url}: {error or type(error).__name__}") from error
        answer.total_s = self._clock() - started


def _take(line: str, answer: Answer) -> list[Delta]:
    """The deltas of one line of the stream; what else it tells goes into `answer`."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return []
    chunk = json.loads(line.removeprefix("data:"))
    if "error" in chunk:
        raise GatewayError(str(chunk["error"].get("message", chunk["error"])))
    usage = chunk.get("usage") or {}
    answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
    answer.num_output_tokens = usage.get("completion_tokens", answer.num_output_tokens)
    debug = chunk.get("paceline") or {}
    answer.details.update({key: value for key, value in debug.items() if key not in _PER_CHUNK})
    answer.details.update(chunk.get("metrics") or {})
    deltas = []
    for choice in chunk.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        text = (choice.get("delta") or {}).get("content") or ""
        if text:
            deltas.append(Delta(text=text, accepted_chars=int(debug.get("accepted_chars", 0))))
    return deltas


def _reason(body: bytes, status: int) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"
