"""What `make` hands on, and from where it takes torch, without installing anything."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.source_tree import ROOT

OF_AN_OUTER_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "PROMPT", "TORCH", "TORCH_INDEX")
PYTORCH = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment in which everything is done, whose python says what it is asked, one word a line."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("""#!/bin/sh\n[ "$4" = config ] && echo "$PIP_SAYS" && exit\nprintf '%s\\n' "$@"\n""")
    python.chmod(0o755)
    for stamp in (".made", ".torch", ".node", ".paceline"):
        (tmp_path / stamp).touch()
    return tmp_path


def make(venv: Path, *words: str, **environment: str) -> list[str]:
    """The lines `make WORDS` says."""
    outer = {name: value for name, value in os.environ.items() if name not in OF_AN_OUTER_MAKE}
    done = subprocess.run(
        ["make", f"VENV={venv}", *words],
        cwd=ROOT,
        env=outer | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "prompt", ["Name three mountains.", """Say "hi", 'you' & $HOME (it costs $5) #1 `x` %s"""]
)
def test_a_prompt_reaches_the_demo_as_it_was_written(venv: Path, prompt: str) -> None:
    assert make(venv, "demo", f"PROMPT={prompt}") == ["-m", "deploy.demo", "--prompt", prompt]
    assert make(venv, "demo", PROMPT=prompt) == ["-m", "deploy.demo", "--prompt", prompt]
    assert make(venv, "demo") == ["-m", "deploy.demo"]


@pytest.mark.parametrize(
    ("pip_says", "words", "index"),
    [
        ("global.timeout='180'", ("TORCH=cpu",), [f"--extra-index-url={PYTORCH}"]),
        ("global.index-url='https://mirror/simple'", ("TORCH=cpu",), []),
        (":env:.find-links='/wheels'", ("TORCH=cpu",), []),
        ("", ("TORCH=cuda",), []),
        ("", ("TORCH=cpu", "TORCH_INDEX="), []),
        (
            ":env:.find-links='/wheels'",
            ("TORCH=cpu", "TORCH_INDEX=https://mine"),
            ["--extra-index-url=https://mine"],
        ),
    ],
)
def test_the_cpu_build_of_torch_comes_from_pytorch_where_pip_knows_only_pypi(
    venv: Path, pip_says: str, words: tuple[str, ...], index: list[str]
) -> None:
    (venv / ".torch").unlink()
    said = make(venv, f"{venv}/.torch", *words, PIP_SAYS=pip_says)
    build = words[0].removeprefix("TORCH=")
    assert said[said.index("install") :] == ["install", *index, "-r", f"requirements/torch-{build}.txt"]
