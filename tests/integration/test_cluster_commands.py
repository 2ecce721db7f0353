"""The commands as a user meets them: help at once, and every setting reachable from three places."""

import dataclasses
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from decode_node.config import DecodeConfig
from deploy import cli
from deploy.config import ChatConfig, UpConfig
from prefill_node.config import PrefillConfig
from router.config import RouterConfig
from tests.setting_names import setting_names
from tests.unit.source_tree import ROOT

COMMANDS = {
    "prefill": (PrefillConfig, "page_size", 32),
    "decode": (DecodeConfig, "max_running", 5),
    "router": (RouterConfig, "max_in_flight", 9),
    "up": (UpConfig, "ready_timeout_s", 12.5),
    "chat": (ChatConfig, "max_tokens", 77),
}
REQUIRED = {"prefill": ["--model", "m"], "decode": ["--model", "m"], "router": ["--model", "m"]}


def setting(command: str, *words: str) -> object:
    """What `paceline COMMAND WORDS` would run with, for the setting tried here."""
    arguments = [command, *REQUIRED.get(command, []), *words]
    _, bound, _ = cli.app.parse_args(arguments, exit_on_error=False, print_error=False)
    config, field, _ = COMMANDS[command]
    settings = bound.arguments.get("settings", config() if command in ("up", "chat") else None)
    return vars_of(settings)[field]


def vars_of(settings: object) -> dict[str, object]:
    assert dataclasses.is_dataclass(settings)
    assert not isinstance(settings, type)
    return dataclasses.asdict(settings)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_costs_less_than_two_seconds_and_names_every_setting(command: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", command, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    missing = [
        name
        for name in setting_names(COMMANDS[command][0])
        if f"--{name.replace('_', '-')}" not in done.stdout
    ]
    assert missing == []
    # Its own time: a busy machine may make it wait.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_setting_comes_from_a_flag_the_environment_or_the_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, field, value = COMMANDS[command]
    assert setting(command) != value
    assert setting(command, f"--{field.replace('_', '-')}", f"{value}") == value
    file = tmp_path / "paceline.toml"
    file.write_text(f"[{command}]\n{field} = {value}\n")
    assert setting(command, "--config", f"{file}") == value
    monkeypatch.setenv(f"PACELINE_{command.upper()}_{field.upper()}", f"{value}")
    assert setting(command) == value
