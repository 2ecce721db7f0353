"""From a path to a model that runs.

Owns the choice of file format and of the dtype "auto". Must never know what is served with it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention import TorchAttention
from engine.loaders.assemble import assemble
from engine.loaders.gguf_file import GgufFile
from engine.loaders.hf_folder import HfFolder
from engine.models.config import ModelConfig, UnsupportedModel
from engine.models.llama import LlamaModel
from engine.pool import TORCH_DTYPES

Checkpoint = HfFolder | GgufFile


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """`weights_fingerprint` depends on the values only; see `engine.loaders.assemble`."""

    model: LlamaModel
    config: ModelConfig
    weights_fingerprint: str


def load_model(
    checkpoint: str | Path | Checkpoint, *, dtype: str, device: torch.device | str, pool_name: str = "target"
) -> LoadedModel:
    """Load a Hugging Face folder or a `.gguf` file, given by its path or opened already.

    dtype: "auto", "float32", "bfloat16" or "float16". pool_name: whose KV regions the model uses.
    Raises UnsupportedModel naming what cannot be run.
    """
    place = torch.device(device)
    torch_dtype = resolve_dtype(dtype, place)
    source = open_checkpoint(Path(checkpoint)) if isinstance(checkpoint, str | Path) else checkpoint
    config = source.config()
    weights, fingerprint = assemble(source, config, dtype=torch_dtype, device=place)
    model = LlamaModel(config, weights, attention=TorchAttention(), pool_name=pool_name)
    return LoadedModel(model=model, config=config, weights_fingerprint=fingerprint)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, nothing but its headers read yet."""
    if path.is_dir():
        return HfFolder(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufFile(path)
    raise UnsupportedModel(f"model path must be a Hugging Face folder or a .gguf file, got {str(path)!r}")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        return torch.bfloat16 if device.type != "cpu" or _cpu_has_bfloat16() else torch.float32
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype must be auto or one of {sorted(TORCH_DTYPES)}, got {dtype!r}")
    return TORCH_DTYPES[dtype]


def _cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False))
