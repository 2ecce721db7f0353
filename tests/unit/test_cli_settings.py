"""Where a setting comes from, and what happens to names and values that mean nothing."""

import dataclasses
import json
import os
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

CONFIGS = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "router": RouterConfig,
    "up": UpConfig,
    "chat": ChatConfig,
}


def parse(*words: str) -> PrefillConfig:
    """What `paceline prefill WORDS` would run with."""
    _, bound, _ = cli.app.parse_args(["prefill", *words], exit_on_error=False, print_error=False)
    settings = bound.arguments["settings"]
    assert isinstance(settings, PrefillConfig)
    return settings


def file(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = file(tmp_path, '[prefill]\nmodel = "file"\nport = 1\npage_size = 32\n')
    monkeypatch.setenv("PACELINE_PREFILL_MODEL", "environment")
    monkeypatch.setenv("PACELINE_PREFILL_PORT", "2")
    settings = parse("--config", config, "--model", "flag")
    assert (settings.model, settings.port, settings.page_size, settings.max_running) == ("flag", 2, 32, 16)


def test_the_file_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PREFILL_CONFIG", file(tmp_path, '[prefill]\nmodel = "file"\n'))
    assert parse().model == "file"


def test_one_file_serves_every_process(tmp_path: Path) -> None:
    config = file(tmp_path, '[router]\nport = 1\n[prefill]\nmodel = "m"\n[decode]\nmodel = "m"\n')
    assert parse("--config", config).port == PrefillConfig(model="m").port


@pytest.mark.parametrize(
    ("words", "environment", "text", "complaint"),
    [
        (("--page-siz", "4"), {}, "", "Unknown option: --page-siz"),
        (
            (),
            {"PACELINE_PREFILL_PAGE_SIZ": "4"},
            "",
            "unknown environment variable PACELINE_PREFILL_PAGE_SIZ",
        ),
        ((), {}, "[prefill]\npage_siz = 4\n", "[page_siz]"),
        ((), {}, "[prefil]\npage_size = 4\n", "unknown table [prefil]"),
        ((), {}, "[prefill\n", "is not TOML"),
        (("--page-size", "0"), {}, "", "page_size must be at least 1, got 0"),
        (("--port", "70000"), {}, "", "port must be in [0, 65535], got 70000"),
        (("--device", "tpu"), {}, "", "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (("--dtype", "int3"), {}, "", '"int3"'),
        (("--config", "nowhere.toml"), {}, "", "config must be a readable file, got 'nowhere.toml'"),
    ],
)
def test_what_means_nothing_is_refused_by_name_and_without_a_traceback(
    tmp_path: Path,
    words: tuple[str, ...],
    environment: dict[str, str],
    text: str,
    complaint: str,
) -> None:
    config = ("--config", file(tmp_path, text)) if text else ()
    done = paceline("prefill", "--model", "m", *words, *config, environment=environment)
    said = done.stdout + done.stderr
    assert done.returncode in {1, 2}
    assert complaint in " ".join(said.split())
    assert "Traceback" not in said


def defaults(config: object) -> dict[str, object]:
    """Every setting that has one, by the name of its flag; those of groups too."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        found |= defaults(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("source", ["file", "environment"])
@pytest.mark.parametrize("command", CONFIGS)
def test_every_setting_is_a_key_of_the_file_and_a_variable(
    command: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is neither would be refused."""
    config = CONFIGS[command]
    plain = config(model="m") if command in ("prefill", "decode", "router") else config()
    values = defaults(plain)
    assert set(setting_names(config)) - values.keys() <= {"seed"}
    words = [command]
    if source == "file":
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        words += ["--config", file(tmp_path, f"[{command}]\n{text}")]
    else:
        for name, value in values.items():
            monkeypatch.setenv(f"PACELINE_{command.upper()}_{name.upper()}", f"{value}")
    _, bound, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert bound.arguments["settings"] == plain


@pytest.mark.parametrize("command", CONFIGS)
def test_help_names_the_flag_and_the_variable_of_every_field(command: str) -> None:
    done = paceline(command, "--help")
    said = "".join(done.stdout.split())
    assert done.returncode == 0
    for name in setting_names(CONFIGS[command]):
        assert f"--{name.replace('_', '-')}" in done.stdout
        assert f"PACELINE_{command.upper()}_{name.upper()}" in said.replace("│", "")


@pytest.mark.parametrize("config", CONFIGS.values())
def test_a_process_has_at_most_25_settings(config: type[PrefillConfig]) -> None:
    assert len(dataclasses.fields(config)) <= 25


def test_help_takes_less_than_a_second_of_a_core() -> None:
    paceline("--help")  # compiles
    before = cpu_s_of_children()
    done = paceline("--help")
    assert done.returncode == 0
    assert cpu_s_of_children() - before < 1.5  # a second, and room for a slow machine
    for command in ("prefill", "decode", "router", "up", "chat", "bench", "convert"):
        assert command in done.stdout


def cpu_s_of_children() -> float:
    """Of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def paceline(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200", **(environment or {})},
    )
