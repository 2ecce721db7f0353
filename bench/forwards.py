"""How long the models themselves run: the outermost calls of their entry points, timed.

Owns the list of those entry points. Replaces them for as long as it measures, and puts them back.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.models.llama import LlamaModel
from speculative.drafts.dflash_network import DflashNetwork
from speculative.eagle import EagleNetwork
from speculative.eagle3 import Eagle3Network
from speculative.mtp import MtpModule

ENTRY_POINTS: tuple[tuple[type, str], ...] = (
    (LlamaModel, "forward"),
    (EagleNetwork, "fuse"),
    (EagleNetwork, "forward"),
    (Eagle3Network, "fuse"),
    (Eagle3Network, "forward"),
    (MtpModule, "fuse"),
    (MtpModule, "forward"),
    (MtpModule, "run"),
    (MtpModule, "predict"),
    (DflashNetwork, "draft"),
    (DflashNetwork, "join"),
    (DflashNetwork, "write_context"),
)


class ForwardClock:
    """`seconds` grows while a model runs. Nested entry points count once. One thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._is_inside = False

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return method(*arguments, **named)
            self._is_inside, started = True, self._clock()
            try:
                return method(*arguments, **named)
            finally:
                self._is_inside = False
                self.seconds += self._clock() - started

        return call


@contextmanager
def forward_clock() -> Iterator[ForwardClock]:
    clock = ForwardClock()
    originals = [(owner, name, vars(owner)[name]) for owner, name in ENTRY_POINTS]
    try:
        for owner, name, method in originals:
            setattr(owner, name, clock.timed(method))
        yield clock
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)
