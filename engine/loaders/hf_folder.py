"""A Hugging Face model folder: configs as dicts, tensors memory-mapped from safetensors files.

Owns the folder's file names. Must never know what the tensors are for.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.models.config import ModelConfig, UnsupportedModel, model_config

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HfFolder:
    """One folder, files opened once. Tensors alias the mapped files: they are read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {name: _opened(name) for name in self._shards()}
        self._where = {key: name for name, file in self._files.items() for key in file.keys()}  # noqa: SIM118

    def config(self) -> ModelConfig:
        return read_config(self.path)

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor

    def _shards(self) -> list[Path]:
        index = self.path / _INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UnsupportedModel(f"{index} must hold a weight_map")
            shards = [self.path / name for name in sorted(set(weight_map.values()))]
        else:
            shards = [self.path / _SINGLE]
        for shard in shards:
            if not shard.is_file():
                raise UnsupportedModel(f"model folder lacks the safetensors file {shard}")
        return shards


def read_config(path: Path) -> ModelConfig:
    """The checked config of a model folder, eos ids from `generation_config.json` where it has them."""
    config, generation = path / "config.json", path / "generation_config.json"
    if not config.is_file():
        raise UnsupportedModel(f"model folder lacks {config}")
    return model_config(read_json(config), read_json(generation) if generation.is_file() else None)


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a file of JSON. Raises UnsupportedModel."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{path} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} must be a whole safetensors file: {error}") from error
