"""The gRPC front end: `Generation`, with the same powers as the HTTP one and through the same door.

Owns the labels Abort knows. Must never know nodes.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Never

import grpc

from router.api_keys import ApiKeys, Bill, User
from router.choices import run_all
from router.errors import BadApiKey, BadRequest, ConsumerTooSlow, DeadlineExceeded, RouterError
from router.front_door import FrontDoor
from router.generation import Ended, TextDelta
from router.grpc_convert import (
    add_totals,
    pack_delta,
    pack_end,
    unpack_grammar,
    unpack_messages,
    unpack_n,
    unpack_prompt_options,
    unpack_sampling,
    unpack_template,
    unpack_tools,
)
from router.grpc_errors import abort
from router.leaving import MAX_UNREAD_S, Sending, left_or_unread, until_left
from router.openai.chat_format import ChatFormat
from router.openai.logprobs import SIZE as LOGPROB_SIZE
from router.openai.tools import NO_TOOLS, Tools
from router.outlet import Outlet
from router.planning import Label, Plan, SamplingOptions, cut
from router.tenants import tenant_of
from router.text.options import PromptOptions
from wire.gen import generate_pb2, generate_pb2_grpc
from wire.logs import about

logger = logging.getLogger(__name__)

Packed = Callable[[], Awaitable[generate_pb2.GenerateResponse]]
"""Makes a message when its turn has come."""


class Aborted(RouterError):
    """The caller's own Abort."""

    grpc_status = "CANCELLED"
    default_code = "aborted"


class GenerationService(generate_pb2_grpc.GenerationServicer):
    """Answers end with one message that has the finish reason, usage and speculation.

    A label may be in use more than once; Abort stops every request of the same user that has it.
    """

    def __init__(
        self,
        door: FrontDoor,
        *,
        new_id: Callable[[], str],
        keys: ApiKeys,
        chat_format: ChatFormat,
        tenant_header: str = "",
        max_unread_s: float = MAX_UNREAD_S,
    ) -> None:
        self._max_unread_s = max_unread_s
        self._door = door
        self._chat_format = chat_format
        self._new_id = new_id
        self._keys = keys
        self._tenant_header = tenant_header
        self._aborts: defaultdict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # reader/writer API
        label = request.request_id or self._new_id()
        try:
            user = self._user(context)
            user.start()
            with self._abortable(user, label) as aborted:

                async def send(packed: Packed) -> None:
                    await context.write(await packed())

                outlet = Outlet(send)
                answer = self._answer(request, context, label=label, user=user, put=outlet.put)
                watch = self._raise_when(aborted, outlet, label)
                await until_left(watch, outlet.through(answer), outlet.pump())
        except RouterError as error:
            await abort(context, error)
        except grpc.aio.BaseError:
            raise
        except Exception:
            logger.exception("a request failed", extra=about(label))
            await abort(context, RouterError("internal error"))

    async def Abort(self, request: generate_pb2.AbortRequest, context: Any) -> generate_pb2.AbortResponse:
        try:
            user = self._user(context)
        except BadApiKey as error:
            await abort(context, error)
        running = self._aborts.get((user.name, request.request_id), set())
        for aborted in running:
            aborted.set()
        return generate_pb2.AbortResponse(found=bool(running))

    @contextmanager
    def _abortable(self, user: User, label: str) -> Iterator[asyncio.Event]:
        """An event that is set when the user aborts what has this label."""
        key, aborted = (user.name, label), asyncio.Event()
        self._aborts[key].add(aborted)
        try:
            yield aborted
        finally:
            self._aborts[key].discard(aborted)
            if not self._aborts[key]:
                del self._aborts[key]

    async def _answer(
        self,
        request: generate_pb2.GenerateRequest,
        context: Any,
        *,
        label: str,
        user: User,
        put: Callable[[Packed], None],
    ) -> None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        told = Label(
            name=label,
            priority=request.priority,
            cache_salt=request.cache_salt,
            trace_context=metadata.get("traceparent", ""),
            tenant=tenant_of(metadata, tenant_header=self._tenant_header, user=user.name),
            deadline_s=_time_left(context),
        )
        tools = unpack_tools(request.chat) if request.HasField("chat") else None
        plans = await self._plans(request, told, tools)
        prompt_ids, is_constrained = plans[0].request.prompt_ids, plans[0].request.constraint is not None
        parts = [
            None
            if tools is None
            else self._chat_format.parts(tools, prompt_ids, is_constrained=is_constrained)
            for _ in plans
        ]
        ends: list[Ended] = []

        async def packed(index: int, item: TextDelta | Ended) -> generate_pb2.GenerateResponse:
            if not isinstance(item, Ended):
                pack = partial(pack_delta, item, label=label, index=index, parts=parts[index])
                return await self._door.aside.run(LOGPROB_SIZE * len(item.prompt_logprobs or ()), pack)
            ends.append(item)
            ended = pack_end(item, label=label, index=index, parts=parts[index])
            if len(ends) == len(plans):
                add_totals(ended, ends, num_prompt_tokens=len(prompt_ids))
            return ended

        bill = Bill(user, len(prompt_ids))
        generations = [self._door.generation(plan, spend=bill.spend) for plan in plans]
        await run_all(generations, lambda index, item: put(partial(packed, index, item)), bill=bill)

    async def _plans(
        self, request: generate_pb2.GenerateRequest, label: Label, tools: Tools | None
    ) -> list[Plan]:
        """One for each choice. `tools` None: no chat."""
        facts = self._door.facts(request.model or None)
        options, sampling = unpack_prompt_options(request), _sampling(request)
        if tools is not None:
            sampling = self._chat_format.options(sampling, tools)
        sampling = await self._door.in_tokens(sampling)
        encoded, param = await self._prompt(request, options, tools or NO_TOOLS)
        return [
            self._door.plan(
                cut(encoded, options, facts, max_tokens=sampling.max_tokens),
                sampling,
                facts=facts,
                label=label,
                choice=choice,
                param=param,
            )
            for choice in range(unpack_n(request))
        ]

    async def _prompt(
        self, request: generate_pb2.GenerateRequest, options: PromptOptions, tools: Tools
    ) -> tuple[tuple[int, ...], str]:
        """Token ids, and the name of the field they came from."""
        match request.WhichOneof("input"):
            case "text":
                return await self._door.encode(request.text, options), "text"
            case "chat":
                chat = request.chat
                return await self._door.encode_chat(
                    unpack_messages(chat), unpack_template(chat, tools), options
                ), "chat"
            case "token_ids":
                return tuple(request.token_ids.ids), "token_ids"
            case _:
                raise BadRequest("input must be text, chat or token_ids, got none of them", param="input")

    async def _raise_when(self, aborted: asyncio.Event, sending: Sending, label: str) -> Never:
        if await left_or_unread(aborted.wait, sending, max_unread_s=self._max_unread_s):
            raise Aborted(f"request {label!r} was aborted")
        raise ConsumerTooSlow("the stream was not read")

    def _user(self, context: Any) -> User:
        """Who calls. Raises BadApiKey."""
        return self._keys.user(str(dict(context.invocation_metadata() or ()).get("authorization", "")))


def _sampling(request: generate_pb2.GenerateRequest) -> SamplingOptions:
    return replace(unpack_sampling(request.sampling), constraint=unpack_grammar(request.grammar))


def _time_left(context: Any) -> float | None:
    """Of the call's own deadline, None without one. Raises DeadlineExceeded."""
    seconds: float | None = context.time_remaining()
    if seconds is not None and seconds <= 0:
        raise DeadlineExceeded("the call's deadline has passed")
    return seconds
