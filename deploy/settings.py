"""Where a command's settings come from: flag, then environment, then file, then default.

Owns the lookup order and the refusal of unknown names. Must never know what a setting means.
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict, Env

PREFIX = "PACELINE_"
CONFIG_FLAG = "--config"


class UnknownSetting(ValueError):
    """A name in the environment or the file that no flag answers to."""


class Environment(Env):
    """PACELINE_<COMMAND>_<FLAG>, for what flags left open."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill the arguments. Raises UnknownSetting."""
        prefix = self.prefix + "".join(f"{command.upper()}_" for command in commands)
        known = {prefix + variable(argument.name) for argument in arguments if argument.name.startswith("--")}
        unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
        if commands and unknown:
            raise UnknownSetting(f"unknown environment variable {', '.join(unknown)}")
        super().__call__(app, commands, arguments)


@dataclass(frozen=True, slots=True)
class File:
    """The command's table in the --config file, for what is still open. The file may hold `tables`."""

    tables: frozenset[str]

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill the arguments. Raises UnknownSetting."""
        path = _config_path(arguments)
        if path is None:
            return
        document = read_file(path)
        for name in document:
            if name not in self.tables:
                raise UnknownSetting(f"unknown table [{name}] in {path}")
        Dict(document, source=str(path))(app, commands, arguments)


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a configuration file. Raises ValueError naming the file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"config must be a readable file, got {str(path)!r}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config {str(path)!r} is not TOML: {error}") from error


def variable(flag: str) -> str:
    """`--page-size` -> `PAGE_SIZE`."""
    return flag.lstrip("-").upper().replace("-", "_")


def _config_path(arguments: ArgumentCollection) -> Path | None:
    for argument in arguments:
        if argument.name == CONFIG_FLAG and argument.tokens:
            return Path(argument.tokens[0].value)
    return None
