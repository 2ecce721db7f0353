"""`make demo` and `paceline up` as a user runs them: real processes, the real model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.source_tree import ROOT

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


def started(output: str) -> dict[str, int]:
    """Name and pid of every process that was started."""
    return {name: int(pid) for name, pid in re.findall(r"started (\S+) \(pid (\d+)\)", output)}


def alive(pids: Iterator[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_the_demo_streams_an_answer_sums_it_up_and_leaves_nothing_running() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "deploy.demo",
            "--prompt",
            "Say: one two three one two three",
            "--max-tokens",
            "24",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(started(done.stdout)) == {"registry", "prefill-0", "decode-0", "router"}
    for fact in (
        "prompt",
        "time to first token",
        "speed after it",
        "KV cache moved",
        "mean acceptance length",
    ):
        assert re.search(rf"^  {fact} +\S", done.stdout, re.MULTILINE), done.stdout
    assert not re.search(r"KV cache moved +0 B", done.stdout), done.stdout
    assert "\x1b" not in done.stdout
    assert alive(iter(started(done.stdout).values())) == []


def test_up_serves_until_sigterm_and_then_ends_every_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "up", "--port", "0", "--grpc-port", "0"]
    with subprocess.Popen(
        [*command, "--log-dir", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ
    ) as up:
        assert up.stdout is not None
        output = ""
        try:
            for line in up.stdout:
                output += line
                if "Ctrl-C stops it" in line:
                    break
            match = re.search(r"HTTP +(http://\S+)/v1", output)
            assert match, output
            assert httpx.get(f"{match[1]}/ready", timeout=60).status_code == 200
            up.send_signal(signal.SIGTERM)
            output += up.stdout.read()
            assert up.wait(120) == 0, output
        finally:
            up.kill()  # its children end with it
    assert output.endswith("stopping\nstopped\n")
    assert alive(iter(started(output).values())) == []
    assert {path.stem for path in tmp_path.glob("*.log")} == set(started(output))
