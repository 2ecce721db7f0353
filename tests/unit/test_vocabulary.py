from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from deploy.models import bundled
from engine.loaders import open_checkpoint
from engine.loaders.gguf_file import GgufFile
from engine.loaders.vocabulary import folder_vocabulary, gguf_vocabulary, vocabulary_of
from engine.models.config import UnsupportedModel
from tests.fallback_tokenizer import FALLBACK_BYTE, FALLBACK_PIECE, byte_fallback_backend
from tests.tiny_models import smollm2_gguf, write_tiny_gguf


def test_a_byte_level_folder(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<tool é>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = folder_vocabulary(tmp_path)
    assert sorted(vocabulary.texts[:256]) == [bytes([byte]) for byte in range(256)]
    assert vocabulary.texts[alphabet.index("Ġ")] == b" "
    assert vocabulary.texts[256:] == (b"", "<tool é>".encode())
    assert [vocabulary.is_text(token_id) for token_id in (-1, 0, 256, 257, 258)] == [
        False, True, False, True, False,
    ]  # fmt: skip


def test_a_byte_fallback_folder(tmp_path: Path) -> None:
    byte_fallback_backend().save(str(tmp_path / "tokenizer.json"))
    texts = folder_vocabulary(tmp_path).texts
    assert texts[:FALLBACK_BYTE] == (b"",) * 3
    assert texts[FALLBACK_BYTE:FALLBACK_PIECE] == tuple(bytes([byte]) for byte in range(256))
    assert texts[FALLBACK_PIECE:] == tuple(
        piece.encode() for piece in (" ", "  ", " the", "cat", " cat", "é", "日", ".")
    )


def test_a_gguf_file(tmp_path: Path) -> None:
    texts = gguf_vocabulary(GgufFile(write_tiny_gguf(tmp_path / "tiny.gguf", with_tokenizer=True))).texts
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(texts) == 256
    assert texts[:3] == (b"", b"", b"")
    assert texts[3 + alphabet.index("a")] == b"a"
    assert texts[255] == texts[3] + texts[4]


def test_a_checkpoint_without_a_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"lacks .*tokenizer\.json"):
        folder_vocabulary(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model must be one of"):
        gguf_vocabulary(GgufFile(write_tiny_gguf(tmp_path / "tiny.gguf")))


@pytest.mark.model
def test_smollm2_reads_alike_as_gguf_and_as_the_folder_made_of_it() -> None:
    texts = vocabulary_of(open_checkpoint(bundled())).texts
    assert vocabulary_of(open_checkpoint(smollm2_gguf())).texts == texts
    assert len(texts) == 49152
    assert texts[:3] == (b"", b"", b"")
    assert texts.count(b"") == 17
