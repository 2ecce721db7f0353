"""A Hugging Face model folder: configs as dicts, tensors memory-mapped from safetensors files.

Owns the folder's file names. Must never know what the tensors are for.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.models.config import ModelConfig, UnsupportedModel, model_config

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HfFolder:
    """One folder, files opened once. Tensors alias the mapped files: they are read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {name: safe_open(name, framework="pt") for name in self._shards()}
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
            weight_map: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            shards = [self.path / name for name in sorted(set(weight_map.values()))]
        else:
            shards = [self.path / _SINGLE]
        for shard in shards:
            if not shard.is_file():
                raise UnsupportedModel(f"model folder lacks the safetensors file {shard}")
        return shards


def read_config(path: Path) -> ModelConfig:
    """The checked config of a model folder, eos ids from `generation_config.json` where it has them."""
    config = _json(path / "config.json")
    if config is None:
        raise UnsupportedModel(f"model folder lacks {path / 'config.json'}")
    return model_config(config, _json(path / "generation_config.json"))


def _json(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    content: Mapping[str, Any] = json.loads(path.read_text())
    return content
