from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.tokenizer import Tokenizer
from tests.fallback_tokenizer import FALLBACK, FALLBACK_BYTE, FALLBACK_PIECE
from tests.smollm2_text import smollm2_text

HANGUL_AND_EMOJI = " 안녕하세요 👩‍👩‍👧 🇰🇷 𝔘𝔫𝔦 é\n\n  two  spaces"


def joined(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> str:
    detokenizer = tokenizer.detokenizer(prompt)
    return "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()


def partial_characters() -> list[int]:
    tokenizer = smollm2_text().tokenizer
    return [
        i
        for i in range(tokenizer.vocab_size)
        if not tokenizer.token_bytes(i).decode("utf-8", "replace").isascii()
    ]


def smollm2_ids() -> st.SearchStrategy[list[int]]:
    vocab_size = smollm2_text().tokenizer.vocab_size
    return st.lists(st.sampled_from(partial_characters()) | st.integers(0, vocab_size - 1), max_size=24)


@settings(max_examples=400, deadline=None)
@given(ids=smollm2_ids())
def test_byte_level_stream_equals_decoding_all_ids(ids: list[int]) -> None:
    tokenizer = smollm2_text().tokenizer
    assert joined(tokenizer, ids) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab ,.\n안녕하é日本🙂👩\u200d👧🇰🇷", max_size=30))
def test_a_text_comes_back_from_its_tokens_without_replacement_characters(text: str) -> None:
    tokenizer = smollm2_text().tokenizer
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.integers(0, FALLBACK.vocab_size - 1) | st.integers(FALLBACK_PIECE, FALLBACK_PIECE + 7))
)
def test_byte_fallback_stream_equals_decoding_all_ids(ids: list[int]) -> None:
    assert joined(FALLBACK, ids) == FALLBACK.decode(ids)


def test_characters_that_span_tokens_arrive_whole() -> None:
    tokenizer = smollm2_text().tokenizer
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode(HANGUL_AND_EMOJI, add_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert len([piece for piece in pieces if piece == ""]) > 10
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == HANGUL_AND_EMOJI


def test_only_a_stream_that_ends_inside_a_character_shows_a_replacement_character() -> None:
    tokenizer = smollm2_text().tokenizer
    ids = list(tokenizer.encode("ok 🇰", add_special_tokens=False))
    assert joined(tokenizer, ids[:-1]) == "ok \ufffd"
    assert joined(tokenizer, ids) == "ok 🇰"


def test_special_tokens_and_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = smollm2_text().tokenizer
    (word,) = tokenizer.encode(" world", add_special_tokens=False)
    assert joined(tokenizer, [0, word, 2, 10**7, word, 1]) == " world world"
    assert joined(FALLBACK, [1, FALLBACK_PIECE + 4, 2, 10**7]) == "cat"


def test_the_space_before_a_continuation_is_kept_and_the_first_of_a_whole_text_is_not() -> None:
    the, cat = FALLBACK_PIECE + 2, FALLBACK_PIECE + 4
    assert joined(FALLBACK, [cat, cat]) == "cat cat"
    assert joined(FALLBACK, [cat, cat], prompt=(1, the)) == " cat cat"


def test_a_byte_run_is_held_until_it_ends_but_known_tentatively() -> None:
    detokenizer = FALLBACK.detokenizer()
    newline = FALLBACK_BYTE + 0x0A
    assert detokenizer.push(FALLBACK_PIECE + 3) == "cat"
    assert detokenizer.push(newline) == ""
    assert detokenizer.tentative() == "\n"
    assert detokenizer.push(FALLBACK_BYTE + 0xE2) == ""
    assert detokenizer.tentative() == ""
    assert detokenizer.finish() == "\ufffd\ufffd"


def test_token_bytes_are_the_bytes_of_the_text() -> None:
    tokenizer = smollm2_text().tokenizer
    ids = tokenizer.encode(HANGUL_AND_EMOJI, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == HANGUL_AND_EMOJI.encode()
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert FALLBACK.token_bytes(FALLBACK_BYTE + 0xE2) == b"\xe2"
    assert FALLBACK.token_text(FALLBACK_PIECE + 2) == " the"
