"""Becomes another program that dies with whoever started it: `python tethered.py PARENT_PID PROGRAM ...`

Owns what has to be set between start and exec. It is a program of its own, because a function run in the
forked copy of a process that has threads (gRPC's, torch's) may find their locks taken. It must import
nothing of ours.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *program = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent):
            raise SystemExit("the process that started this one is gone")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
