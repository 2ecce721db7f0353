"""Several generations at once, their items told one by one. Must never know how they are shown."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from router.api_keys import Bill
from router.errors import RouterError
from router.generation import Ended, Generation, TextDelta
from router.leaving import in_group

Emit = Callable[[int, TextDelta | Ended], Awaitable[None]]


async def run_all(generations: Sequence[Generation], emit: Emit, *, bill: Bill) -> None:
    """Run them all; `emit` gets the place of a generation and its next item, one at a time. The first
    RouterError closes all and is raised, as does being cancelled. `bill`: of all of them."""
    with bill:
        if len(generations) == 1:
            await _pump(0, generations[0], emit)
        else:
            await _run_several(generations, emit)


async def _run_several(generations: Sequence[Generation], emit: Emit) -> None:
    lock = asyncio.Lock()

    async def emit_alone(index: int, item: TextDelta | Ended) -> None:
        async with lock:
            await emit(index, item)

    async def run(group: asyncio.TaskGroup) -> None:
        for index, generation in enumerate(generations):
            group.create_task(_pump(index, generation, emit_alone))

    await in_group(run, comes_first=_is_fault)  # a fault of ours must not be lost behind what a node did


async def _pump(index: int, generation: Generation, emit: Emit) -> None:
    async with aclosing(generation.run()) as items:
        async for item in items:
            await emit(index, item)


def _is_fault(error: BaseException) -> bool:
    return not isinstance(error, BaseExceptionGroup | RouterError)
