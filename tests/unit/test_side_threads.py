import subprocess
import sys
import threading

import pytest

from engine.side_threads import SideThreads


def test_jobs_run_and_errors_are_told() -> None:
    threads = SideThreads(2, name="side")
    names = [threads.submit(lambda: threading.current_thread().name).result(timeout=60) for _ in range(5)]
    assert set(names) <= {"side_0", "side_1"}
    failed = threads.submit(lambda number: 1 // number, 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(timeout=60)
    assert threads.submit(lambda number: 1 // number, 1).result(timeout=60) == 1


def test_a_cancelled_job_does_not_run() -> None:
    threads, gate = SideThreads(1, name="side"), threading.Event()
    ran: list[int] = []
    blocking = threads.submit(gate.wait, 60)
    cancelled = threads.submit(ran.append, 1)
    assert cancelled.cancel()
    gate.set()
    assert blocking.result(timeout=60)
    assert threads.submit(lambda: list(ran)).result(timeout=60) == []


def test_a_job_that_never_ends_does_not_keep_the_process() -> None:
    code = (
        "import threading; from engine.side_threads import SideThreads;"
        "SideThreads(1, name='side').submit(threading.Event().wait); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "done\n")
