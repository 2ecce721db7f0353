"""Several generations at once, their items told one by one. Must never know how they are shown."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from router.api_keys import Bill
from router.errors import RouterError
from router.generation import Ended, Generation, TextDelta
from router.leaving import in_group

Emit = Callable[[int, TextDelta | Ended], None]


async def run_all(generations: Sequence[Generation], emit: Emit, *, bill: Bill) -> None:
    """Run them all; `emit` gets the place of a generation and its next item. The first RouterError closes all
    and is raised, as does being cancelled. `bill`: of all of them."""

    async def run(group: asyncio.TaskGroup) -> None:
        for index, generation in enumerate(generations):
            group.create_task(generation.run(partial(emit, index)))

    with bill:
        if len(generations) == 1:
            await generations[0].run(partial(emit, 0))
        else:
            await in_group(run, comes_first=_is_fault)  # a fault of ours must not be lost behind a node's


def _is_fault(error: BaseException) -> bool:
    return not isinstance(error, BaseExceptionGroup | RouterError)
