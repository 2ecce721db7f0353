"""From named checkpoint tensors to the fused weights of a model, with nothing missing or left over.

Owns fusing, the check of names and shapes, and the fingerprint. Must never know file formats.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Protocol

import torch

from engine.loaders.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    IGNORED_SUFFIXES,
    Piece,
    all_pieces,
    layer_name,
    layer_pieces,
)
from engine.models.config import ModelConfig, UnsupportedModel
from engine.models.weights import LayerWeights, ModelWeights

_FINGERPRINT_SAMPLES = 1024


class TensorSource(Protocol):
    """A checkpoint by Hugging Face tensor names; a tensor is read when it is asked for."""

    def names(self) -> frozenset[str]: ...

    def load(self, name: str) -> torch.Tensor: ...


def check_names(source: TensorSource, config: ModelConfig) -> None:
    """Raises UnsupportedModel naming the first tensors that are missing, or that nothing would use."""
    needed = {piece.name for piece in all_pieces(config)}
    present = source.names()
    missing = sorted(needed - present)
    if missing:
        raise UnsupportedModel(f"checkpoint lacks {len(missing)} tensors, first {missing[:3]}")
    unused = sorted(name for name in present - needed if not name.endswith(IGNORED_SUFFIXES))
    if config.tie_embeddings and HEAD in unused:
        unused.remove(HEAD)
    if unused:
        raise UnsupportedModel(f"checkpoint has {len(unused)} tensors nothing uses, first {unused[:3]}")


def assemble(
    source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Read, check, cast and fuse every tensor."""
    check_names(source, config)
    reader = _Reader(source, dtype, device)
    embedding_VE = reader.read(Piece(EMBEDDING, (config.vocab_size, config.hidden_size)))
    return ModelWeights(
        embedding_VE=embedding_VE,
        layers=tuple(_layer(reader, config, index) for index in range(config.num_layers)),
        final_norm_E=reader.read(Piece(FINAL_NORM, (config.hidden_size,))),
        head_VE=embedding_VE
        if config.tie_embeddings
        else reader.read(Piece(HEAD, (config.vocab_size, config.hidden_size))),
    )


def fingerprint(weights: ModelWeights) -> str:
    """Equal for equal values after rounding to bfloat16, whatever file they came from.

    Hashes names, shapes and evenly spaced samples of every tensor, so it costs milliseconds.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in _named(weights):
        flat = tensor.flatten()
        step = max(1, flat.numel() // _FINGERPRINT_SAMPLES)
        sample = flat[::step].to(device="cpu", dtype=torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()


class _Reader:
    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def read(self, piece: Piece) -> torch.Tensor:
        tensor = self._source.load(piece.name)
        if tuple(tensor.shape) != piece.shape:
            raise UnsupportedModel(f"{piece.name} must have shape {piece.shape}, got {tuple(tensor.shape)}")
        return tensor.to(device=self._device, dtype=self._dtype)


def _layer(reader: _Reader, config: ModelConfig, index: int) -> LayerWeights:
    tensors: dict[str, torch.Tensor | None] = {}
    for field, pieces in layer_pieces(config).items():
        parts = [reader.read(Piece(layer_name(index, piece.name), piece.shape)) for piece in pieces]
        if field == "qk_norm_HD" and parts:
            parts = [
                part.expand(heads, -1)
                for part, heads in zip(parts, (config.num_heads, config.num_kv_heads), strict=True)
            ]
        tensors[field] = None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
    return LayerWeights(**tensors)  # type: ignore[arg-type]  # the table's keys are the fields


def _named(weights: ModelWeights) -> Iterator[tuple[str, torch.Tensor]]:
    yield "embedding_VE", weights.embedding_VE
    yield "final_norm_E", weights.final_norm_E
    yield "head_VE", weights.head_VE
    for index, layer in enumerate(weights.layers):
        for field in fields(layer):
            tensor = layer.__getattribute__(field.name)
            if tensor is not None:
                yield f"{index}.{field.name}", tensor
