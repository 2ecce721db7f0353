"""What grammars let follow the nodes of a round, worked out beside the forward and never waited for long.

Most masks take microseconds, but a grammar can be written whose masks take seconds or do not end. Such a
request sits rounds out until its masks are there, and drafts no more; nobody else waits for it.
Owns the jobs. Must never know logits, nor what becomes of a mask.
"""

import logging
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Executor, Future, wait

from engine.grammar import Words
from engine.sampling_state import SamplingState
from speculative.proposer import Proposal
from speculative.tree import Tree, build

logger = logging.getLogger(__name__)

GRACE_S = 0.005
"""How long a step waits for masks that are not there with its logits: once for each request at most."""

Masks = list[Words | None]

_ROOT = build(0, Proposal())


class Masking:
    """Invariant: a request has at most one job, and its state is left alone while that runs."""

    def __init__(self, executor: Executor | None = None) -> None:
        """`executor` None: masks are made where they are asked for."""
        self._executor = executor
        self._jobs: dict[Hashable, Future[Masks]] = {}
        self._slow: set[Hashable] = set()

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def begin(self, key: Hashable, state: SamplingState, tree: Tree = _ROOT) -> None:
        """Work out what may follow the nodes of `tree`, or the last token alone; unless there is a job."""
        if key not in self._jobs:
            first_child, next_sibling = tree.links()
            self._jobs[key] = self._submit(
                lambda: state.masks(tree.token_ids, first_child=first_child, next_sibling=next_sibling)
            )

    def may_run(self, key: Hashable) -> bool:
        """False while a round of this request would have to wait."""
        job = self._jobs.get(key)
        return job is None or job.done()

    def may_draft(self, key: Hashable) -> bool:
        return key not in self._slow and key not in self._jobs

    def is_slow(self, key: Hashable) -> bool:
        return key in self._slow

    def wait(self, keys: Iterable[Hashable]) -> None:
        """Give the jobs of a step a moment; whose is not done then is slow from now on."""
        jobs = {key: self._jobs[key] for key in keys}
        if not all(job.done() for job in jobs.values()):
            wait(jobs.values(), timeout=GRACE_S)
            self._slow |= {key for key, job in jobs.items() if not job.done()}

    def take(self, key: Hashable) -> Masks:
        """The masks of a job that is done. Raises ValueError for an output that does not follow, and where
        the grammar's own code failed: that costs this request, not the engine."""
        job = self._jobs.pop(key)
        error = job.exception()
        if error is None:
            return job.result()
        if not isinstance(error, ValueError):
            logger.error("the masks of a grammar could not be made", exc_info=error)
        raise ValueError(str(error) or type(error).__name__) from error

    def forget(self, key: Hashable) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            job.cancel()
        self._slow.discard(key)

    def _submit(self, make: Callable[[], Masks]) -> Future[Masks]:
        if self._executor is not None:
            return self._executor.submit(make)
        job: Future[Masks] = Future()
        try:
            job.set_result(make())
        except Exception as error:  # noqa: BLE001  a job's boundary: `take` records it
            job.set_exception(error)
        return job
