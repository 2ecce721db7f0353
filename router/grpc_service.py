"""The gRPC front end: `Generation`, with the same powers as the HTTP one and through the same door.

Owns status codes and the labels Abort knows. Must never know nodes.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Never

import grpc

from router.api_keys import ApiKeys, User
from router.errors import BadApiKey, BadRequest, RouterError
from router.front_door import FrontDoor
from router.generation import Ended
from router.grpc_convert import pack_delta, pack_end, unpack_grammar, unpack_messages, unpack_sampling
from router.leaving import until_left
from router.planning import Label, Plan
from router.tenants import tenant_of
from wire.gen import generate_pb2, generate_pb2_grpc

logger = logging.getLogger(__name__)


class Aborted(RouterError):
    """The caller's own Abort."""

    grpc_status = "CANCELLED"
    default_code = "aborted"


class GenerationService(generate_pb2_grpc.GenerationServicer):
    """Answers end with one message that has the finish reason, usage and speculation.

    A label may be in use more than once; Abort stops every request that has it.
    """

    def __init__(
        self, door: FrontDoor, *, new_id: Callable[[], str], keys: ApiKeys, tenant_header: str = ""
    ) -> None:
        self._door = door
        self._new_id = new_id
        self._keys = keys
        self._tenant_header = tenant_header
        self._aborts: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # reader/writer API
        label = request.request_id or self._new_id()
        aborted = asyncio.Event()
        self._aborts[label].add(aborted)
        try:
            user = self._user(context)
            user.start()
            answer = self._answer(request, context, label=label, user=user)
            await until_left(_raise_when(aborted, label), answer)
        except RouterError as error:
            await _abort(context, error)
        except grpc.aio.BaseError:
            raise
        except Exception:
            logger.exception("request %s failed", label)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")
        finally:
            self._aborts[label].discard(aborted)
            if not self._aborts[label]:
                del self._aborts[label]

    async def Abort(self, request: generate_pb2.AbortRequest, context: Any) -> generate_pb2.AbortResponse:
        try:
            self._user(context)
        except BadApiKey as error:
            await _abort(context, error)
        running = self._aborts.get(request.request_id, set())
        for aborted in running:
            aborted.set()
        return generate_pb2.AbortResponse(found=bool(running))

    async def _answer(
        self, request: generate_pb2.GenerateRequest, context: Any, *, label: str, user: User
    ) -> None:
        plan = await self._plan(request, label, tenant=self._tenant(context, user))
        num_prompt_tokens = len(plan.request.prompt_ids)
        async with aclosing(self._door.generation(plan, spend=user.spend).run()) as items:
            async for item in items:
                if isinstance(item, Ended):
                    await context.write(pack_end(item, label=label, num_prompt_tokens=num_prompt_tokens))
                else:
                    await context.write(pack_delta(item, label=label))

    def _tenant(self, context: Any, user: User) -> str:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        return tenant_of(metadata, tenant_header=self._tenant_header, user=user.name)

    async def _plan(self, request: generate_pb2.GenerateRequest, label: str, *, tenant: str) -> Plan:
        facts = self._door.facts(request.model or None)
        prompt_ids, param = await self._prompt(request)
        options = unpack_sampling(request.sampling)
        return self._door.plan(
            prompt_ids,
            replace(options, constraint=unpack_grammar(request.grammar)),
            facts=facts,
            label=Label(name=label, priority=request.priority, cache_salt=request.cache_salt, tenant=tenant),
            param=param,
        )

    async def _prompt(self, request: generate_pb2.GenerateRequest) -> tuple[tuple[int, ...], str]:
        """Token ids, and the name of the field they came from."""
        match request.WhichOneof("input"):
            case "text":
                return await self._door.encode(request.text), "text"
            case "chat":
                return await self._door.encode_chat(unpack_messages(request.chat)), "chat"
            case "token_ids":
                return tuple(request.token_ids.ids), "token_ids"
            case _:
                raise BadRequest("input must be text, chat or token_ids, got none of them", param="input")

    def _user(self, context: Any) -> User:
        """Who calls. Raises BadApiKey."""
        return self._keys.user(str(dict(context.invocation_metadata() or ()).get("authorization", "")))


async def _raise_when(aborted: asyncio.Event, label: str) -> Never:
    await aborted.wait()
    raise Aborted(f"request {label!r} was aborted")


async def _abort(context: Any, error: RouterError) -> Never:
    """End the call with the error's status; its code and field go along as trailing metadata."""
    metadata = [("paceline-code", error.code)]
    if error.param is not None and error.param.isascii():
        metadata.append(("paceline-param", error.param))
    if error.retry_after_s is not None:
        metadata.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(metadata))
    raise AssertionError("abort raises")
