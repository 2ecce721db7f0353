"""The pages for operators: metrics, where to scrape the nodes, and the live page with its feed.

Owns their routes. They are on the main port or on one of their own. Must never know nodes or requests.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from wire.metric import CONTENT_TYPE

_FEED_AGE_S = 0.5
_JSON = "application/json"


class Operations(Protocol):
    """What operators may ask of the router."""

    def report(self) -> dict[str, Any]:
        """Pairs and nodes with their states; `ready` says whether users can be served."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text."""
        ...

    def targets(self) -> list[dict[str, Any]]:
        """Where to scrape the nodes."""
        ...

    def feed(self) -> dict[str, Any]:
        """What the live page shows."""
        ...

    def settings(self) -> dict[str, Any]:
        """How the router is set up; no secrets, no addresses."""
        ...

    def answered(self, route: str, *, method: str, status: int, seconds: float) -> None:
        """One HTTP request is over."""
        ...


class AdminPages:
    """However many people watch, the feed is made at most twice a second."""

    def __init__(self, operations: Operations, *, authorise: Callable[[Request], object]) -> None:
        self._operations = operations
        self._authorise = authorise
        self._page = files("router").joinpath("dashboard", "index.html").read_text(encoding="utf-8")
        self._policy = _policy(self._page)
        self._feed = b""
        self._feed_until = float("-inf")

    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self.metrics),
            Route("/metrics/targets", self.targets),
            Route("/dashboard", self.dashboard),
            Route("/dashboard/data", self.data),
        ]

    async def metrics(self, _request: Request) -> Response:
        return Response(self._operations.metrics(), media_type=CONTENT_TYPE)

    async def targets(self, _request: Request) -> Response:
        return Response(msgspec.json.encode(self._operations.targets()), media_type=_JSON)

    async def dashboard(self, _request: Request) -> Response:
        """The page itself says nothing, so it needs no key; its feed does."""
        headers = {
            "content-security-policy": self._policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)

    async def data(self, request: Request) -> Response:
        self._authorise(request)
        now = asyncio.get_running_loop().time()
        if now >= self._feed_until:
            self._feed = msgspec.json.encode(self._operations.feed())
            self._feed_until = now + _FEED_AGE_S
        return Response(self._feed, media_type=_JSON, headers={"cache-control": "no-store"})


def _policy(page: str) -> str:
    """Only the script and the style that are in the page may run, and it may talk to this server only."""
    scripts, styles = _digests(page, "script"), _digests(page, "style")
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digests(page: str, tag: str) -> str:
    texts: list[str] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
