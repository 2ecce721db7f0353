"""A dispatcher that replays scripted token ids, and a front door around it: no nodes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from router.access import Access
from router.api_keys import ApiKeys, single_entry
from router.errors import RouterError
from router.front_door import FrontDoor
from router.generation import Generates
from router.http import HttpFrontEnd, HttpOptions
from router.listening import HttpServer, uvicorn_config
from router.openai.answers import Answers
from router.openai.chat_format import ChatFormat
from router.planning import Planner
from router.requests import Delta, GenerateRequest, Outcome, Take, Timings, TokenLogprob
from router.served import ServedModel
from router.text.model_text import ModelText
from router.text.parsers.catalogue import PLAIN, AnswerFormat
from wire.records import NodeRecord

MODEL = "smol"
MAX_MODEL_LEN = 512


def outcome(reason: str, num_tokens: int, **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "reason": reason,
        "stop_token_id": None,
        "cached_tokens": 3,
        "num_output_tokens": num_tokens,
        "num_steps": num_tokens,
        "drafted": 0,
        "accepted": 0,
        "kv_bytes": 4096,
        "transport": "memory",
        "timings": Timings(ttft_s=0.25),
        "prefill_node": "p:1",
        "decode_node": "d:1",
        "attempts": 1,
    }
    return Outcome(**values | changes)


@dataclass
class FakeDispatcher:
    """Answers every request with `script`, cut as nodes would: at max_tokens and after a stop token.

    rounds: how many tokens each delta carries in turn, the last one repeating; all but one were drafts.
    fail_after: after that many tokens raise `error`. stall_after: after that many tokens wait for ever.
    """

    script: Sequence[int] = ()
    script_for: Callable[[GenerateRequest], Sequence[int]] | None = None
    rounds: Sequence[int] = (1,)
    error: RouterError | None = None
    fail_after: int = 0
    stall_after: int | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0
    num_closed_early: int = 0
    num_produced: int = 0
    num_stalled: int = 0
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_stalled(self, count: int) -> None:
        """Until so many generations wait for ever."""
        while self.num_stalled < count:
            self.stalled.clear()
            await self.stalled.wait()

    async def until_idle(self) -> None:
        """Until no generation is open."""
        await self.idle.wait()

    async def generate(self, request: GenerateRequest, take: Take) -> Outcome | None:
        self.requests.append(request)
        self.num_open += 1
        self.idle.clear()
        is_over = False
        try:
            async with aclosing(self._items(request)) as items:
                async for item in items:
                    if isinstance(item, Outcome):
                        is_over = True
                        return item
                    if not take(item):
                        break
            return None
        except RouterError:
            is_over = True
            raise
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self.idle.set()
            self.num_closed_early += not is_over

    async def _items(self, request: GenerateRequest) -> AsyncGenerator[Delta | Outcome]:
        script = self.script if self.script_for is None else self.script_for(request)
        ids, reason = as_nodes_would_cut(script, request)
        sent = turn = 0
        while sent < len(ids):
            await asyncio.sleep(0)
            await self._maybe_break(sent)
            width = self.rounds[min(turn, len(self.rounds) - 1)]
            turn += 1
            delta = self._delta(request, sent, ids[sent : sent + width])
            sent += len(delta.ids)
            self.num_produced += len(delta.ids)
            yield delta
        await self._maybe_break(sent)
        yield outcome(reason, len(ids))

    async def _maybe_break(self, sent: int) -> None:
        if self.error is not None and sent >= self.fail_after:
            raise self.error
        if self.stall_after is not None and sent >= self.stall_after:
            self.num_stalled += 1
            self.stalled.set()
            await asyncio.Event().wait()

    def _delta(self, request: GenerateRequest, first: int, ids: Sequence[int]) -> Delta:
        logprobs = None
        if request.sampling.logprobs is not None:
            top = request.sampling.logprobs
            logprobs = tuple(
                TokenLogprob(-0.5, tuple((token_id + k, -0.5 - k) for k in range(top))) for token_id in ids
            )
        drafts = len(ids) - 1
        return Delta(
            first_index=first,
            ids=tuple(ids),
            logprobs=logprobs,
            drafted=2 * drafts,
            accepted=drafts,
            prompt_logprobs=None if first else prompt_scores(request),
        )


def prompt_scores(request: GenerateRequest) -> tuple[TokenLogprob, ...] | None:
    """Prompt token i scores -i; the likeliest are it, then the ids after it, each one worse."""
    top = request.sampling.prompt_logprobs
    if top is None:
        return None
    return tuple(
        TokenLogprob(-float(i), tuple((token_id + k, -float(i) - k) for k in range(top)))
        for i, token_id in enumerate(request.prompt_ids[1:], start=1)
    )


def as_nodes_would_cut(script: Sequence[int], request: GenerateRequest) -> tuple[Sequence[int], str]:
    """Token ids up to the cap or the stop token, and the reason."""
    sampling = request.sampling
    for index, token_id in enumerate(script[: sampling.max_tokens]):
        if token_id in sampling.stop_token_ids and index >= sampling.min_tokens:
            return script[: index + 1], "stop"
    return script[: sampling.max_tokens], "length"


@dataclass
class FakeRecords:
    records: tuple[NodeRecord, ...] = ()


def record(**changes: Any) -> NodeRecord:
    values: dict[str, Any] = {
        "role": "decode",
        "address": "d:1",
        "incarnation": "d1",
        "model": MODEL,
        "layout": "x",
        "page_size": 16,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 49152,
        "transports": ("memory",),
        "eos_token_ids": (2,),
    }
    return NodeRecord(**values | changes)


@dataclass
class FakeOperations:
    is_ready: bool = True
    num_feeds: int = 0
    says: dict[str, Any] = field(default_factory=lambda: {"model": MODEL})
    answers: list[tuple[str, str, int]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {"ready": self.is_ready, "pairs": [], "nodes": []}

    def settings(self) -> dict[str, Any]:
        return {"policy": "least_load"}

    def metrics(self) -> bytes:
        return b"paceline_router_requests_total 1.0\n"

    def targets(self) -> list[dict[str, Any]]:
        return [{"targets": ["d:9"], "labels": {"role": "decode", "model": MODEL}}]

    def feed(self) -> dict[str, Any]:
        self.num_feeds += 1
        return self.says

    def answered(self, route: str, *, method: str, status: int, seconds: float) -> None:
        self.answers.append((route, method, status))


def chat_format(text: ModelText, answer_format: AnswerFormat = PLAIN) -> ChatFormat:
    ids = iter(range(10**6))
    return ChatFormat(text.tokenizer, new_id=lambda: f"{next(ids):032}", answer_format=answer_format)


def open_to_all() -> ApiKeys:
    return ApiKeys(clock=lambda: 0.0)


def one_key(key: str) -> ApiKeys:
    return ApiKeys(single_entry(key), clock=lambda: 0.0)


def front_door(dispatcher: Generates, text: ModelText, *, node: NodeRecord | None = None) -> FrontDoor:
    seeds = iter(range(1000, 10**6))
    return FrontDoor(
        dispatcher,
        text=text,
        served=ServedModel(alias="", default="x", text=text, nodes=FakeRecords((node or record(),))),
        planner=Planner(mint_seed=lambda: next(seeds)),
        clock=lambda: 0.0,
    )


def http_app(dispatcher: Generates, text: ModelText, *, has_admin: bool = True, **options: Any) -> ASGIApp:
    """The HTTP application on a dispatcher; `node` is what its registry knows."""
    ids = iter(range(10**6))
    return http_front(dispatcher, text, **options).app(lambda: f"req{next(ids)}", has_admin=has_admin)


@asynccontextmanager
async def listening(
    app: ASGIApp, access: Access | None = None, *, buffer_bytes: int | None = None
) -> AsyncGenerator[str]:
    """Host and port where `app` is served. Its server closes every connection, also after a failure."""
    server = HttpServer(uvicorn_config(app, access))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        if buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def http_front(
    dispatcher: Generates,
    text: ModelText,
    *,
    node: NodeRecord | None = None,
    operations: FakeOperations | None = None,
    keys: ApiKeys | None = None,
    answer_format: AnswerFormat = PLAIN,
    tenant_header: str = "",
) -> HttpFrontEnd:
    door = front_door(dispatcher, text, node=node)
    ids = iter(range(10**6))
    answers = Answers(
        door,
        new_id=lambda: f"id{next(ids)}",
        wall_clock=lambda: 1700000000.5,
        chat_format=chat_format(text, answer_format),
    )
    return HttpFrontEnd(
        answers,
        keys=keys or open_to_all(),
        served=door.served,
        operations=operations or FakeOperations(),
        options=HttpOptions(version="1.2.3", max_body_bytes=100_000, tenant_header=tenant_header),
        created=1700000000,
    )
