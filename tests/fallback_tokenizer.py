"""A tokenizer like Llama 2's: pieces with ▁, bytes as <0xXX>, a leading space stripped from a whole text."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from router.text.tokenizer import Tokenizer

FALLBACK_BYTE = 3
"""Id of the token <0x00>."""

FALLBACK_PIECE = FALLBACK_BYTE + 256
"""Id of the first piece: ▁ ▁▁ ▁the cat ▁cat é 日 . in this order."""


def byte_fallback_backend() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "cat", "▁cat", "é", "日", "."]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


FALLBACK = Tokenizer(byte_fallback_backend(), eos_token_ids=(2,))
