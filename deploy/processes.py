"""Child processes that never outlive us: started in their own group, logged to a file, stopped as a group.

Owns starting, watching and ending. Must never know what the processes do.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import ProcessDied

TAIL_LINES = 30
TETHERED = (sys.executable, "-I", "-S", f"{Path(__file__).with_name('tethered.py')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to start. `environment` is added to ours."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


class Child:
    """One running process. Its group is dead once `stop` has returned."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._is_stopping = False

    @classmethod
    async def start(cls, command: Command, *, log: Path) -> "Child":
        """Start it with both outputs in `log`. Raises ProcessDied when it cannot be started."""
        program = command.arguments[0]
        if shutil.which(program) is None:
            raise ProcessDied(f"{command.name} could not be started: {program} is not a program")
        with log.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *TETHERED,
                    f"{os.getpid()}",
                    *command.arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **command.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise ProcessDied(f"{command.name} could not be started: {error}") from error
        return cls(command.name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def watch(self) -> None:
        """Wait for its end. Raises ProcessDied with the tail of its log unless we stopped it."""
        status = await self._process.wait()
        if not self._is_stopping:
            raise ProcessDied(f"{self.name} ended with status {status}\n{self.tail()}")

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to whatever is left of the group after `grace_s`. Idempotent."""
        self._is_stopping = True
        try:
            self._signal(signal.SIGTERM)
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass  # killed below
        finally:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log, with its path."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"--- last lines of {self.log}", *text, "---"])

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # the whole group is gone


def cores() -> int:
    """Cores this process may really use: the affinity mask, cut by a cgroup quota."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))
