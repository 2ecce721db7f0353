"""What a model is called when nobody says. Must never know what is in it."""

import os
from pathlib import Path


def model_name(path: str) -> str:
    """The name of a model's folder, dots and all, or that of its .gguf file without the suffix."""
    place = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100  a link keeps its own name
    return place.stem if place.suffix.lower() == ".gguf" else place.name
