"""From named checkpoint tensors to the fused weights of a model, with nothing missing or left over.

Owns fusing, the check of names and shapes, and the fingerprint. Must never know file formats.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.linear import Linear
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
) -> tuple[ModelWeights, str]:
    """Read, check, cast, fuse and lay out every tensor, part by part; the weights and their fingerprint.

    The fingerprint is equal for equal values after rounding to bfloat16, whatever file they came from.
    """
    check_names(source, config)
    reader, digest = _Reader(source, dtype, device), _Digest()
    table = (config.vocab_size, config.hidden_size)
    embedding_VE = reader.read(Piece(EMBEDDING, table), is_kept=True)
    final_norm_E = reader.read(Piece(FINAL_NORM, (config.hidden_size,)), is_kept=True)
    head_VE = embedding_VE if config.tie_embeddings else reader.read(Piece(HEAD, table))
    digest.add("embedding_VE", embedding_VE)
    digest.add("final_norm_E", final_norm_E)
    digest.add("head_VE", head_VE)
    weights = ModelWeights(
        embedding_VE=embedding_VE,
        layers=tuple(_layer(reader, config, index, digest) for index in range(config.num_layers)),
        final_norm_E=final_norm_E,
        head=Linear(head_VE),
    )
    return weights, digest.value()


class _Digest:
    """Hashes names, shapes and evenly spaced samples of tensors, so it costs milliseconds."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.flatten()
        step = max(1, flat.numel() // _FINGERPRINT_SAMPLES)
        sample = flat[::step].to(device="cpu", dtype=torch.bfloat16).view(torch.int16)
        self._digest.update(f"{name} {tuple(tensor.shape)}".encode())
        self._digest.update(sample.contiguous().numpy().tobytes())

    def value(self) -> str:
        return self._digest.hexdigest()


class _Reader:
    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def read(self, piece: Piece, *, is_kept: bool = False) -> torch.Tensor:
        """Aliases the checkpoint's file where it can, and so keeps all of it, unless it `is_kept`."""
        tensor = self._source.load(piece.name)
        if tuple(tensor.shape) != piece.shape:
            raise UnsupportedModel(f"{piece.name} must have shape {piece.shape}, got {tuple(tensor.shape)}")
        return tensor.to(device=self._device, dtype=self._dtype, copy=is_kept)

    def read_stack(self, pieces: Sequence[Piece]) -> torch.Tensor:
        if len(pieces) == 1:
            return self.read(pieces[0], is_kept=len(pieces[0].shape) == 1)
        return torch.cat([self.read(piece) for piece in pieces])


def _layer(reader: _Reader, config: ModelConfig, index: int, digest: _Digest) -> LayerWeights:
    tensors: dict[str, torch.Tensor] = {}
    for part, pieces in layer_pieces(config).items():
        named = [Piece(layer_name(index, piece.name), piece.shape) for piece in pieces]
        if part == "qk_norm_HD" and named:
            heads = (config.num_heads, config.num_kv_heads)
            gains = [reader.read(piece).expand(count, -1) for piece, count in zip(named, heads, strict=True)]
            tensors[part] = torch.cat(gains)
        elif named:
            tensors[part] = reader.read_stack(named)
        if named:
            digest.add(f"{index}.{part}", tensors[part])
    return LayerWeights(
        input_norm_E=tensors["input_norm_E"],
        qkv=Linear(tensors["qkv_FE"], tensors.get("qkv_bias_F")),
        qk_norm_HD=tensors.get("qk_norm_HD"),
        output=Linear(tensors["output_EA"], tensors.get("output_bias_E")),
        post_norm_E=tensors["post_norm_E"],
        gate_up=Linear(tensors["gate_up_GE"]),
        down=Linear(tensors["down_EM"]),
    )
