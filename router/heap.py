"""The garbage collector of a process that holds a large vocabulary. Must never know what is in it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_YOUNG = 50_000


@contextmanager
def settled_heap() -> Iterator[None]:
    """What is there now stays, and the collector lets it alone: a full collection, which halts every stream,
    then takes as long as requests in flight are many, not as the vocabulary is large. Young objects it looks
    at less often, for those of one event or request are gone with it.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
