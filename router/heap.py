"""The garbage collector of a process that holds a large vocabulary. Must never know what is in it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_heap() -> Iterator[None]:
    """What is there now stays, and the collector leaves it alone. So a full one, which stops every stream,
    takes as long as the requests in flight are many, not as the vocabulary is large."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
