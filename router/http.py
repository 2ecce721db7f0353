"""The HTTP front end: the OpenAI endpoints, and what operators ask.

Owns routes. Must never know nodes; what it serves comes through `FrontDoor` and `Operations`.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from router.admin import AdminPages, Operations
from router.api_keys import ApiKeys, User
from router.errors import ModelNotFound, RouterError
from router.event_stream import Events, EventStream
from router.http_edge import (
    ClientGone,
    JsonResponse,
    RequestIds,
    client_gone_response,
    error_body,
    error_response,
    read_body,
    request_label,
    until_disconnect,
)
from router.http_metrics import CountRequests
from router.openai.answers import Answers, Origin
from router.openai.bodies import decode_body
from router.openai.document import Json, document
from router.openai.requests import read_chat, read_completion
from router.openai.responses import read_response
from router.openai.tokenizing import read_detokenize, read_tokenize
from router.planning import Label
from router.served import ServedModel
from router.tenants import tenant_of


class Exchange(Events[Any], Protocol):
    """One accepted request and its answer, given either way."""

    async def body(self) -> dict[str, Any]:
        """The whole answer. Raises RouterError."""
        ...


Prepare = Callable[[Mapping[str, Any], Origin], Awaitable[tuple[Exchange, bool]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """What the front end says of itself, and what it takes."""

    version: str
    max_body_bytes: int
    tenant_header: str = ""


class HttpFrontEnd:
    """Every answer that is not a stream or metrics is JSON; every error has the OpenAI shape."""

    def __init__(
        self,
        answers: Answers,
        *,
        keys: ApiKeys,
        served: ServedModel,
        operations: Operations,
        options: HttpOptions,
        created: int,
    ) -> None:
        self._answers = answers
        self._keys = keys
        self._served = served
        self._operations = operations
        self._options = options
        self._created = created
        self._admin = AdminPages(operations, authorise=self._user)

    def app(self, new_id: Callable[[], str], *, has_admin: bool = True) -> ASGIApp:
        """The ASGI application, with or without the pages for operators."""
        routes = self.routes(has_admin=has_admin)
        app = Starlette(
            routes=routes,
            exception_handlers={
                RouterError: _on_router_error,
                HTTPException: _on_http_error,
                Exception: _on_any_error,
            },
        )
        app.router.redirect_slashes = False
        # Outside of Starlette's own error handling, so that answers to our faults carry the id too.
        return RequestIds(CountRequests(app, routes, self._operations.answered), new_id)

    def routes(self, *, has_admin: bool = True) -> list[Route]:
        """Every path that is served."""
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/version", self.version),
            Route("/server_info", self.server_info),
            Route("/workers", self.workers),
            *(Route(path, self.live) for path in ("/live", "/livez", "/liveness")),
            *(Route(path, self.ready) for path in ("/ready", "/readyz", "/readiness")),
            *(Route(path, self.health) for path in ("/health", "/healthz")),
            *((Route("/openapi.json", self.openapi), *self._admin.routes()) if has_admin else ()),
        ]

    async def completions(self, request: Request) -> Response:
        async def prepare(body: Mapping[str, Any], origin: Origin) -> tuple[Exchange, bool]:
            asked = read_completion(body)
            return await self._answers.completion(asked, origin), asked.wishes.is_stream

        return await self._answer(request, prepare)

    async def chat(self, request: Request) -> Response:
        async def prepare(body: Mapping[str, Any], origin: Origin) -> tuple[Exchange, bool]:
            asked = read_chat(body)
            return await self._answers.chat(asked, origin), asked.wishes.is_stream

        return await self._answer(request, prepare)

    async def responses(self, request: Request) -> Response:
        async def prepare(body: Mapping[str, Any], origin: Origin) -> tuple[Exchange, bool]:
            asked = read_response(body)
            return await self._answers.response(asked, origin), asked.wishes.is_stream

        return await self._answer(request, prepare)

    async def tokenize(self, request: Request) -> Response:
        return await self._reply(request, lambda body: self._answers.tokenize(read_tokenize(body)))

    async def detokenize(self, request: Request) -> Response:
        return await self._reply(request, lambda body: self._answers.detokenize(read_detokenize(body)))

    async def models(self, request: Request) -> Response:
        self._user(request)
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._user(request)
        asked, name = request.path_params["model"], self._served.name
        if asked != name:
            raise ModelNotFound(f"model must be {name!r}, got {asked!r}", param="model")
        return JsonResponse(self._model())

    async def live(self, _request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        report = self._operations.report()
        return JsonResponse(report, status_code=200 if report["ready"] else 503)

    async def health(self, _request: Request) -> Response:
        is_ready = self._operations.report()["ready"]
        status = "ok" if is_ready else "unavailable"
        return JsonResponse({"status": status}, status_code=200 if is_ready else 503)

    async def version(self, _request: Request) -> Response:
        return JsonResponse({"version": self._options.version})

    async def server_info(self, request: Request) -> Response:
        self._user(request)
        facts = self._served.facts(None)
        return JsonResponse(
            {
                "version": self._options.version,
                "model": facts.name,
                "max_model_len": facts.max_model_len,
                "vocab_size": facts.vocab_size,
                "settings": self._operations.settings(),
            }
        )

    async def workers(self, request: Request) -> Response:
        self._user(request)
        return JsonResponse(self._operations.report())

    async def openapi(self, _request: Request) -> Response:
        return JsonResponse(document(self._options.version))

    async def _reply(
        self, request: Request, handle: Callable[[Mapping[str, Any]], Coroutine[Any, Any, Json]]
    ) -> Response:
        """A JSON answer to a JSON body, made here without any node."""
        self._user(request)
        try:
            body = await self._body(request)
            return JsonResponse(await until_disconnect(request.receive, handle(body)))
        except ClientGone:
            return client_gone_response()

    async def _answer(self, request: Request, prepare: Prepare) -> Response:
        user = self._user(request)
        user.start()
        try:
            body = await self._body(request)
            exchange, is_stream = await prepare(body, self._origin(request, user))
            if is_stream:
                return EventStream(exchange)
            return JsonResponse(await until_disconnect(request.receive, exchange.body()))
        except ClientGone:
            return client_gone_response()

    async def _body(self, request: Request) -> dict[str, Any]:
        return await decode_body(await read_body(request, max_bytes=self._options.max_body_bytes))

    def _origin(self, request: Request, user: User) -> Origin:
        headers = request.headers
        label = Label(
            name=request_label(request),
            trace_context=headers.get("traceparent", ""),
            tenant=tenant_of(headers, tenant_header=self._options.tenant_header, user=user.name),
        )
        return Origin(label=label, user=user, is_debug=headers.get("x-paceline-debug") == "1")

    def _model(self) -> dict[str, Any]:
        facts = self._served.facts(None)
        return {
            "id": facts.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": facts.max_model_len or None,
        }

    def _user(self, request: Request) -> User:
        """Who asks. Raises BadApiKey."""
        return self._keys.user(request.headers.get("authorization", ""))


async def _on_router_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, found by the routing."""
    assert isinstance(error, HTTPException)
    named = RouterError(f"{request.method} {request.url.path}: {error.detail}", code="not_found")
    if error.status_code == 405:
        named = RouterError(f"{request.url.path} does not take {request.method}", code="method_not_allowed")
    body = error_body(named)
    body["error"]["type"] = "invalid_request_error"
    return JsonResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_any_error(_request: Request, _error: Exception) -> Response:
    """The server logs the exception; the client learns nothing about our insides."""
    return error_response(RouterError("internal error"))
