"""The vocabulary of a checkpoint, from a folder's tokenizer.json or a GGUF file's own fields.

Owns where each format keeps it and which tokens it marks as control tokens. Must never know who reads it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from engine.loaders.gguf_file import GgufFile
from engine.loaders.hf_folder import HfFolder
from engine.models.config import UnsupportedModel
from engine.vocabulary import Vocabulary, is_byte_level, piece_bytes

_GGUF_BYTE_LEVEL = {"gpt2": True, "llama": False}
_GGUF_NO_TEXT = {2, 3, 5}  # unknown, control, unused


def vocabulary_of(checkpoint: HfFolder | GgufFile) -> Vocabulary:
    """Raises UnsupportedModel when the checkpoint has no vocabulary that is understood."""
    if isinstance(checkpoint, HfFolder):
        return folder_vocabulary(checkpoint.path)
    return gguf_vocabulary(checkpoint)


def folder_vocabulary(path: Path) -> Vocabulary:
    """Raises UnsupportedModel when there is no tokenizer.json."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModel(f"model folder lacks {file}")
    backend = tokenizers.Tokenizer.from_file(str(file))
    byte_level = is_byte_level(json.loads(backend.to_str()))
    vocab = backend.get_vocab(with_added_tokens=True)
    texts = [b""] * (max(vocab.values(), default=-1) + 1)
    for piece, token_id in vocab.items():
        texts[token_id] = piece_bytes(piece, is_byte_level=byte_level)
    for token_id, token in backend.get_added_tokens_decoder().items():
        texts[token_id] = b"" if token.special else token.content.encode()
    return Vocabulary(tuple(texts))


def gguf_vocabulary(file: GgufFile) -> Vocabulary:
    """Raises UnsupportedModel for a kind of tokenizer that is not understood."""
    kind = str(file.field("tokenizer.ggml.model"))
    if kind not in _GGUF_BYTE_LEVEL:
        raise UnsupportedModel(
            f"tokenizer.ggml.model must be one of {sorted(_GGUF_BYTE_LEVEL)}, got {kind!r}"
        )
    pieces: Sequence[str] = file.field("tokenizer.ggml.tokens")
    types: Sequence[int] = file.field("tokenizer.ggml.token_type", [1] * len(pieces))
    return Vocabulary(
        tuple(
            b"" if int(type_) in _GGUF_NO_TEXT else piece_bytes(piece, is_byte_level=_GGUF_BYTE_LEVEL[kind])
            for piece, type_ in zip(pieces, types, strict=True)
        )
    )
