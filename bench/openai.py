"""Asks any OpenAI server for completions and times the answers.

Owns the client side of /v1/completions. Must never know which server it is.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.http_stream import BadResponse, StreamParser
from deploy.errors import GatewayError

READ_BYTES = 65536
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. Tokens are the server's own count; seconds run from sending the request."""

    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    total_s: float
    acceptance_length: float | None = None
    """Mean tokens of a round, where the server tells (Paceline does)."""


class OpenAi:
    """One server. A connection for each request, opened before the clock starts."""

    def __init__(
        self, url: str, *, api_key: str = "", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"against must be an http or https URL, got {url!r}")
        self.url = url
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._clock = clock

    async def model(self) -> str:
        """Name of the first model the server offers. Raises GatewayError."""
        body, _ = await self._exchange("GET", "/v1/models", None)
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise GatewayError(f"{self.url} offers no model: {body[:200]!r}") from error

    async def complete(self, prompt: str, *, model: str, max_tokens: int) -> Completion:
        """One greedy answer of exactly `max_tokens` tokens. Raises GatewayError."""
        request = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reading = Reading(self._clock)
        _, events = await self._exchange("POST", "/v1/completions", request, reading=reading)
        if not events:
            raise GatewayError(f"{self.url} did not stream an answer")
        return reading.completion()

    async def _exchange(
        self, method: str, path: str, body: Any, *, reading: "Reading | None" = None
    ) -> tuple[bytes, int]:
        """Body of a plain answer and number of events of a streamed one."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
                try:
                    if reading is not None:
                        reading.start()
                    writer.write(self._request(method, path, body))
                    return await self._read(reader, reading)
                finally:
                    writer.close()
        except (OSError, BadResponse, TimeoutError) as error:
            raise GatewayError(f"{self.url}: {error or type(error).__name__}") from error

    async def _read(self, reader: asyncio.StreamReader, reading: "Reading | None") -> tuple[bytes, int]:
        parser, num_events = StreamParser(), 0
        while not parser.is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                parser.finish()
                break
            for event in parser.feed(data):
                num_events += 1
                if reading is not None:
                    reading.take(event)
        if not 200 <= parser.status < 300:
            raise GatewayError(
                f"{self.url} answered {parser.status}: {parser.body[:300].decode(errors='replace')}"
            )
        return parser.body, num_events

    def _request(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(content)}",
        ]
        if self._api_key:
            lines.append(f"authorization: Bearer {self._api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + content


class Reading:
    """What the events of one streamed completion come to. The first text or token ends the wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = 0.0
        self._first: float | None = None
        self._last = 0.0
        self._usage: dict[str, Any] = {}
        self._acceptance: float | None = None

    def start(self) -> None:
        self._started = self._clock()

    def take(self, event: bytes) -> None:
        """Take one event's payload in. Raises GatewayError for an error event."""
        if event == b"[DONE]":
            return
        chunk = json.loads(event)
        if "error" in chunk:
            raise GatewayError(f"the stream ended with an error: {chunk['error']}")
        self._last = self._clock()
        if chunk.get("choices") and self._first is None:
            self._first = self._last
        self._usage = chunk.get("usage") or self._usage
        speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
        if speculation.get("num_spec_steps"):
            self._acceptance = float(speculation["mean_acceptance_length"])

    def completion(self) -> Completion:
        """Raises GatewayError when the server did not count its tokens."""
        if self._first is None or "completion_tokens" not in self._usage:
            raise GatewayError("the server sent no text or no usage")
        return Completion(
            num_prompt_tokens=int(self._usage.get("prompt_tokens", 0)),
            num_output_tokens=int(self._usage["completion_tokens"]),
            ttft_s=self._first - self._started,
            total_s=self._last - self._started,
            acceptance_length=self._acceptance,
        )
