"""An OpenAI-like front for a vLLM prefill server and decode server, so that a pair can be measured as one.

Owns the two calls such a pair wants: the prompt to one server with `max_tokens` 1, then the same request
with the transfer parameters that came back to the other, whose answer goes through byte for byte.
"""

import argparse
import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.http_stream import BadResponse, StreamParser

READ_BYTES = 65536
NO_TRANSFER_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where one of the two servers listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Address":
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"url must be http://host:port, got {url!r}")
        return cls(parts.hostname, parts.port)


def for_prefill(request: dict[str, Any]) -> dict[str, Any]:
    """The request as the prefill server wants it: one token, whole, and to be handed over."""
    kept = {key: value for key, value in request.items() if key not in ("stream", "stream_options")}
    return {**kept, "max_tokens": 1, "kv_transfer_params": NO_TRANSFER_YET}


def for_decode(request: dict[str, Any], prefilled: dict[str, Any]) -> dict[str, Any]:
    """The request as the decode server wants it. Raises ValueError when nothing was handed over."""
    transfer = prefilled.get("kv_transfer_params")
    if not transfer:
        raise ValueError(f"the prefill server handed nothing over: {json.dumps(prefilled)[:300]}")
    return {**request, "kv_transfer_params": transfer}


class PairFront:
    """Serves one connection at a time per client; every answer ends its connection."""

    def __init__(self, prefill: Address, decode: Address) -> None:
        self._prefill = prefill
        self._decode = decode

    async def serve(self, host: str, port: int) -> None:
        """Serve until cancelled."""
        async with await asyncio.start_server(self._answer, host, port) as server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, body = await _read_request(reader)
            if method == "POST" and path.endswith("/completions"):
                body = await self._with_transfer(path, json.loads(body))
            await _pass_through(self._decode, method, path, body=body, to=writer)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            writer.write(_bad_gateway(error))
        finally:
            writer.close()

    async def _with_transfer(self, path: str, request: dict[str, Any]) -> bytes:
        prompt = json.dumps(for_prefill(request)).encode()
        prefilled = json.loads(await _fetch(self._prefill, path, prompt))
        return json.dumps(for_decode(request, prefilled)).encode()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return method, path, await reader.readexactly(int(headers.get("content-length", "0")))


async def _pass_through(
    address: Address, method: str, path: str, *, body: bytes, to: asyncio.StreamWriter
) -> None:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(_request(address, method, path, body))
        while data := await reader.read(READ_BYTES):
            to.write(data)
            await to.drain()
    finally:
        writer.close()


async def _fetch(address: Address, path: str, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(_request(address, "POST", path, body))
        parser = StreamParser()
        while not parser.is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                parser.finish()
            parser.feed(data)
    finally:
        writer.close()
    if parser.status != 200:
        raise BadResponse(f"the prefill server answered {parser.status}: {parser.body[:300]!r}")
    return parser.body


def _request(address: Address, method: str, path: str, body: bytes) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {address.host}:{address.port}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _bad_gateway(error: Exception) -> bytes:
    body = json.dumps({"error": {"message": str(error), "type": "bad_gateway"}}).encode()
    head = (
        f"HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", default="http://127.0.0.1:8131", help="URL of the prefill server")
    parser.add_argument("--decode", default="http://127.0.0.1:8132", help="URL of the decode server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8130)
    options = parser.parse_args()
    front = PairFront(Address.of(options.prefill), Address.of(options.decode))
    asyncio.run(front.serve(options.host, options.port))


if __name__ == "__main__":
    main()
