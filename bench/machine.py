"""What a report must say of the machine and the code it measured. Reads, changes nothing."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from deploy.processes import cores

LIBRARIES = ("torch", "transformers", "nixl", "grpcio", "uvicorn")


def facts() -> dict[str, Any]:
    """Plain values for JSON. The load average tells whether the machine was quiet at the start."""
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version for name in LIBRARIES if (version := _version(name))},
        "commit": _commit(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu_name() -> str:
    """The model name of the first processor, or the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the working tree, with a mark when it is changed; "" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
