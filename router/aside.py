"""Long computations beside the event loop, so that one of them never holds up the streams of others.

Owns the threads. Must never know what is computed.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LONG = 4096
"""From this size on a thread is worth it. Sizes are in characters to be tokenised, of which some thousand
take a millisecond."""

_NUM_THREADS = 2


class Aside:
    """At most two computations run at once; the others wait.

    Tokenisers let go of the interpreter lock while they work, Python code gives it up every few milliseconds.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="aside")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, done here when it is short."""
        if size < LONG:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
