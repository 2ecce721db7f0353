"""Folders for what tests make once and share, such as tiny models.

Owns where they lie and that they go when the tests end. Must never know what is in them.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp


@cache
def scratch() -> TemporaryDirectory[str]:
    """The one folder of this process around all others; `tests/conftest.py` removes it."""
    return TemporaryDirectory(prefix="paceline-tests-")


def new_folder(name: str) -> Path:
    """A folder that does not exist yet, called `name`, in a new one."""
    return Path(mkdtemp(dir=scratch().name)) / name
