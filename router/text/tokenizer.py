"""A model's tokenizer, read from its Hugging Face folder with the `tokenizers` package alone.

Owns what the folder says about text: the vocabulary, special tokens, end-of-sequence ids. Must never
import transformers (it would bring torch in) nor know which request a text belongs to.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from router.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from wire.vocabulary import byte_of, is_byte_level, piece_bytes

_NUM_CONTEXT_TOKENS = 4


class Tokenizer:
    """Text to token ids and back for one model; read-only, safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._pieces = _pieces(backend)
        self._is_byte_level = is_byte_level(msgspec.json.decode(backend.to_str()))
        self._bytes = tuple(piece_bytes(piece, is_byte_level=self._is_byte_level) for piece in self._pieces)
        self._byte_ids = frozenset(i for i, piece in enumerate(self._pieces) if byte_of(piece) is not None)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json, and tokenizer_config.json and generation_config.json where there are any.

        Raises ValueError when there is no readable tokenizer.json.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"model folder must hold a tokenizer.json, got {str(folder)!r}; "
                "`paceline convert FILE.gguf FOLDER` makes one of a .gguf file"
            )
        backend = tokenizers.Tokenizer.from_file(str(path))
        names = _special_tokens(read_json(folder / "tokenizer_config.json"))
        eos = _eos_ids(read_json(folder / "generation_config.json"))
        if not eos and "eos_token" in names:
            token_id = backend.token_to_id(names["eos_token"])
            eos = () if token_id is None else (token_id,)
        return cls(backend, special_tokens=names, eos_token_ids=eos)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; `add_special_tokens`: with those of the post-processor (a BOS, say)."""
        # The batch call lets go of the interpreter lock, the single one does not.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)

    def decode(self, ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Text of ids; special tokens are left out unless `shows_special`."""
        return self._backend.decode(list(ids), skip_special_tokens=not shows_special)

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, shows_special: bool = False) -> Detokenizer:
        """A fresh incremental decoder for what follows `prompt_ids`."""
        hidden_ids = frozenset[int]() if shows_special else self.special_ids
        if self._is_byte_level:
            return ByteDetokenizer(self._bytes, hidden_ids)
        known = range(len(self._pieces))
        shown = [i for i in prompt_ids[-_NUM_CONTEXT_TOKENS:] if i in known and i not in hidden_ids]
        while shown and shown[-1] in self._byte_ids:
            shown.pop()
        return WindowDetokenizer(
            partial(self.decode, shows_special=shows_special),
            known=known,
            special_ids=hidden_ids,
            byte_ids=self._byte_ids,
            context=shown,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, also when it is special; empty for ids without a token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """One token on its own, as log-probabilities show it; U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is no file. Raises ValueError naming the file."""
    if not path.is_file():
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{path.name} must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            names[name] = content
    return names


def _eos_ids(generation_config: dict[str, Any]) -> tuple[int, ...]:
    value = generation_config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _pieces(backend: tokenizers.Tokenizer) -> tuple[str, ...]:
    vocab = backend.get_vocab(with_added_tokens=True)
    pieces = [""] * (max(vocab.values(), default=-1) + 1)
    for piece, token_id in vocab.items():
        pieces[token_id] = piece
    return tuple(pieces)
