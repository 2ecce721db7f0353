"""Children of the local cluster: watched while they run, gone afterwards whatever happens."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.errors import ProcessDied
from deploy.processes import Child, Command
from deploy.threads import thread_environment

SLEEP = "import time; time.sleep(600)"


def python(program: str) -> Command:
    return Command(name="child", arguments=[sys.executable, "-c", program], environment={"SAID": "hello"})


@asynccontextmanager
async def started(program: str, log: Path) -> AsyncIterator[Child]:
    child = await Child.start(python(program), log=log)
    try:
        yield child
    finally:
        await child.stop(grace_s=0)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before, or while it is read
        return False
    return state != "Z"


def until_dead(pid: int, *, timeout_s: float = 60.0) -> bool:
    end = time.monotonic() + timeout_s
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_alive(pid)


def first_line(log: Path, *, timeout_s: float = 60.0) -> str:
    end = time.monotonic() + timeout_s
    while "\n" not in log.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    return log.read_text().splitlines()[0]


async def test_a_death_is_reported_with_status_and_the_end_of_the_log(tmp_path: Path) -> None:
    program = "import os; print(os.environ['SAID']); print('last words'); raise SystemExit(3)"
    async with started(program, tmp_path / "log") as child:
        with pytest.raises(ProcessDied, match=r"child ended with status 3\n(.|\n)*hello\nlast words"):
            await child.watch()


async def test_a_program_that_does_not_exist_is_a_death(tmp_path: Path) -> None:
    command = Command(name="child", arguments=["/nowhere/program"], environment={})
    with pytest.raises(ProcessDied, match="child could not be started"):
        await Child.start(command, log=tmp_path / "log")


async def test_a_stopped_child_is_no_death(tmp_path: Path) -> None:
    async with started(SLEEP, tmp_path / "log") as child:
        watch = asyncio.ensure_future(child.watch())
        await asyncio.sleep(0)
        await child.stop(grace_s=5)
        await watch
        assert not child.is_running


async def test_stopping_kills_a_child_that_ignores_sigterm_and_its_own_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); time.sleep(600)"
    )
    async with started(program, log) as child:
        grandchild = int(await asyncio.to_thread(first_line, log))
        await child.stop(grace_s=0.1)
        assert until_dead(child.pid)
        assert until_dead(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path, root: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from deploy.processes import Child, Command\n"
        "async def main():\n"
        f"    child = await Child.start(Command(name='c', arguments=[sys.executable, '-c', {SLEEP!r}],"
        f" environment={{}}), log=Path({str(tmp_path / 'log')!r}))\n"
        "    print(child.pid, flush=True)\n"
        "    await child.watch()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert is_alive(child)
        finally:
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
    assert until_dead(child)


def test_a_waiting_thread_spins_for_a_moment_and_then_sleeps() -> None:
    assert thread_environment(2) == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "20000",
    }
