"""A draft model's folder: its config, and its tensors under one set of names, each to be used exactly once.

Owns file formats and the check that nothing is missing, misshapen or left over. Must never know what a
tensor is for.
"""

import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.loaders.hf_folder import HfFolder, read_json

_FINGERPRINT_SAMPLES = 1024
_TORCH_FILE = "pytorch_model.bin"

Rename = Callable[[str], str | None]
"""Canonical name of a checkpoint tensor, or None for one that is known not to be needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFolder:
    """`config` is `config.json` as it stands; `tensors` are as on disk, by canonical name.

    Tensors that `rename` drops are gone; the rest must all be taken (see `TensorReader.finish`).
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def name(self) -> str:
        return self.path.name

    def fingerprint(self, *facts: object) -> str:
        """Equal for equal values (after rounding to bfloat16) and equal `facts`; costs milliseconds."""
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            flat = tensor.flatten()
            sample = flat[:: max(1, flat.numel() // _FINGERPRINT_SAMPLES)]
            if sample.is_floating_point():
                sample = sample.to(torch.bfloat16).view(torch.int16)
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(sample.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def reader(self, *, dtype: torch.dtype, device: torch.device) -> "TensorReader":
        return TensorReader(self, dtype=dtype, device=device)


class TensorReader:
    """Takes tensors by name, cast and placed; `finish` when the network is complete."""

    def __init__(self, folder: DraftFolder, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._folder.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises ValueError naming a tensor that is missing or of another shape."""
        return self.take_raw(name, shape).to(device=self.device, dtype=self.dtype)

    def take_if(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        return self.take(name, shape) if self.has(name) else None

    def take_raw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `take`, with the values and type of the file: for tables of ids."""
        tensor = self._folder.tensors.get(name)
        if tensor is None:
            raise ValueError(f"draft {self._folder.name}: the checkpoint lacks {name}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"draft {self._folder.name}: {name} must have shape {shape}, got {tuple(tensor.shape)}"
            )
        self._taken.add(name)
        return tensor

    def finish(self) -> None:
        """Raises ValueError naming tensors that nothing uses."""
        unused = sorted(set(self._folder.tensors) - self._taken)
        if unused:
            raise ValueError(
                f"draft {self._folder.name}: the checkpoint has {len(unused)} tensors nothing uses,"
                f" first {unused[:3]}"
            )


def open_draft(path: str, rename: Rename) -> DraftFolder:
    """Read the folder at `path`. Raises ValueError naming what it lacks or names twice."""
    folder = Path(path)
    if not path or not folder.is_dir():
        raise ValueError(f"draft must be a folder with a draft model, got {path!r}")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"draft folder lacks {config_file}")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _stored(folder).items():
        canonical = rename(name)
        if canonical is None:
            continue
        if canonical in tensors:
            raise ValueError(f"draft {folder.name}: the checkpoint holds {canonical} twice, also as {name}")
        tensors[canonical] = tensor
    return DraftFolder(path=folder, config=read_json(config_file), tensors=tensors)


def tensors_of(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a torch file, by name. Raises ValueError naming a file that holds anything else."""
    stored = load_torch(path)
    if not isinstance(stored, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in stored.values()
    ):
        raise ValueError(f"{path} must be a torch file of tensors by name")
    return stored


def load_torch(path: Path) -> Any:
    """What a torch file holds, by torch's own safe reader. Raises ValueError for a file it cannot read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, struct.error) as error:
        raise ValueError(f"{path} must be a torch file: {error}") from error


def _stored(folder: Path) -> Mapping[str, torch.Tensor]:
    torch_file = folder / _TORCH_FILE
    has_safetensors = any(folder.glob("*.safetensors"))
    if torch_file.is_file() and not has_safetensors:
        return tensors_of(torch_file)
    source = HfFolder(folder)
    return {name: source.load(name) for name in source.names()}
