"""What the tokens of a vocabulary stand for, in bytes.

Owns the two ways vocabularies write bytes. Must never know what the text is for. No torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`texts[i]` is what token i adds to a text: b"" for control tokens and for ids without a token."""

    texts: tuple[bytes, ...]

    def is_text(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.texts) and self.texts[token_id] != b""


def byte_of(piece: str) -> int | None:
    """The byte that a byte token such as <0x0A> stands for; None for any other piece."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return None if match is None else int(match[1], 16)


def piece_bytes(piece: str, *, is_byte_level: bool) -> bytes:
    """The bytes of one piece. Byte-level vocabularies write every byte as a printable character; the others
    write a space as ▁ and single bytes as <0xXX>."""
    if is_byte_level:
        if all(char in _BYTE_ALPHABET for char in piece):
            return bytes(_BYTE_ALPHABET[char] for char in piece)
        return piece.encode()
    byte = byte_of(piece)
    return piece.replace("\u2581", " ").encode() if byte is None else bytes([byte])


def is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """Of the content of a tokenizer.json: whether its decoder is ByteLevel and nothing else."""
    decoder = tokenizer["decoder"] or {}
    if decoder.get("type") == "Sequence":
        return [part.get("type") for part in decoder["decoders"]] == ["ByteLevel"]
    return bool(decoder.get("type") == "ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for bytes (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return alphabet


_BYTE_ALPHABET = _byte_alphabet()
