"""Counts answered HTTP requests by route, method and status, and how long they took.

Owns which label values there can be. Must never know what is served.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_OTHER = "other"
_CLIENT_GONE = 499


class Answered(Protocol):
    def __call__(self, route: str, *, method: str, status: int, seconds: float) -> None:
        """One request is over."""
        ...


class CountRequests:
    """Around the whole application. A path that no route matches counts as `other`, as does its method."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], answered: Answered) -> None:
        self._app = app
        self._answered = answered
        self._paths: dict[Any, str] = {}
        for route in routes:
            if isinstance(route, Route):
                self._paths.setdefault(route.endpoint, route.path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        started, status = loop.time(), _CLIENT_GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else _OTHER
            route = self._paths.get(scope.get("endpoint"), _OTHER)
            self._answered(route, method=method, status=status, seconds=loop.time() - started)
