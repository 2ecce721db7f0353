"""How late an event loop is: a task that sleeps, and what came on top of the sleep.

Owns the measuring. A loop that computes, or a thread that keeps the interpreter lock, shows here first.
"""

import asyncio

from wire.tally import Distribution, Tally

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """`run` measures until cancelled."""

    def __init__(self, *, interval_s: float = 0.25) -> None:
        self._interval_s = interval_s
        self._tally = Tally(BOUNDS)
        self.last_s = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.note(loop.time() - due)

    def note(self, lag_s: float) -> None:
        """One measurement; clocks that count in milliseconds may say a little less than nothing."""
        self.last_s = max(0.0, lag_s)
        self._tally.observe(self.last_s)

    def read(self) -> Distribution:
        return self._tally.read()
