"""A GGUF file written out as a Hugging Face folder, once, so that everything else reads folders.

Owns what goes into the folder: bfloat16 safetensors, configs, tokenizer. Must never know who reads it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from engine.loaders.assemble import check_names
from engine.loaders.gguf_file import GgufFile
from engine.loaders.names import all_pieces

_MAX_SHARD_BYTES = 2 * 1024**3

Progress = Callable[[int, int], None]
"""Called as progress(tensors_done, tensors_total)."""


def convert_gguf(gguf_path: str | Path, folder: str | Path, *, progress: Progress | None = None) -> Path:
    """Write the model at `gguf_path` to `folder` and return it; the folder appears only when whole.

    Raises UnsupportedModel before anything is written when the model could not be run, and
    FileExistsError when `folder` is there already.
    """
    source_path, target = Path(gguf_path), Path(folder)
    if target.exists():
        raise FileExistsError(f"folder must not exist yet, got {str(target)!r}")
    source = GgufFile(source_path)
    check_names(source, source.config())
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    _write_tensors(source, partial, progress or _silent)
    _write_configs(source, partial)
    _write_tokenizer(source, source_path, partial)
    return partial.rename(target)


def convert_tokenizer(gguf_path: Path, folder: Path) -> Path:
    """Write what a folder says of text, not the weights, to `folder`; return it. Raises UnsupportedModel."""
    source = GgufFile(gguf_path)
    folder.mkdir(parents=True, exist_ok=True)
    _write_configs(source, folder)
    _write_tokenizer(source, gguf_path, folder)
    return folder


def _silent(done: int, total: int) -> None:
    """Progress nobody watches."""


def _write_tensors(source: GgufFile, folder: Path, progress: Progress) -> None:
    names = [piece.name for piece in all_pieces(source.config())]
    shards = _shards(source, names)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for index, shard in enumerate(shards):
        single = len(shards) == 1
        file_name = "model.safetensors" if single else f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in shard:
            tensors[name] = source.load(name).to(torch.bfloat16).contiguous()
            total_bytes += tensors[name].nbytes
            weight_map[name] = file_name
            progress(len(weight_map), len(names))
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if len(shards) > 1:
        index_content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index_content)


def _shards(source: GgufFile, names: list[str]) -> list[list[str]]:
    """Names in order, cut so that no shard but a single large tensor exceeds the limit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        num_bytes = source.num_elements(name) * torch.bfloat16.itemsize
        if shards[-1] and size + num_bytes > _MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def _write_configs(source: GgufFile, folder: Path) -> None:
    config = {key: value for key, value in source.hf_config().items() if value is not None}
    _write_json(folder / "config.json", config | {"dtype": "bfloat16"})
    special = {"bos_token_id", "eos_token_id", "pad_token_id"}
    _write_json(folder / "generation_config.json", {key: config[key] for key in config if key in special})


def _write_tokenizer(source: GgufFile, gguf_path: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.model_max_length = source.config().max_model_len
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _write_json(folder / "special_tokens_map.json", dict(tokenizer.special_tokens_map))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
