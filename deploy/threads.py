"""OpenMP settings of a node's process. They are read when torch is loaded, so they must be set before."""

import os

_SPIN_COUNT = 20_000


def thread_environment(threads: int) -> dict[str, str]:
    """For a process whose engine uses up to `threads`.

    A thread that waits spins a fraction of a millisecond, as long as the next operation of a step is
    away, then sleeps and leaves its core to whoever computes. Without the spin a step takes half as
    long again; without the end to it an idle node slows its neighbours down.
    """
    return {
        "OMP_NUM_THREADS": f"{threads}",
        "MKL_NUM_THREADS": f"{threads}",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": f"{_SPIN_COUNT}",
    }


def prepare(threads: int) -> None:
    """Set what is not set already, for this process; 0 threads: as many as it has cores."""
    for name, value in thread_environment(threads or len(os.sched_getaffinity(0))).items():
        os.environ.setdefault(name, value)
