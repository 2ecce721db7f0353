import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stops import StopMatcher
from router.text.stream import TextStream
from tests.fallback_tokenizer import FALLBACK, FALLBACK_BYTE, FALLBACK_PIECE
from tests.smollm2_text import smollm2_text


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, bool]:
    out = []
    for piece in pieces:
        if matcher.is_stopped:
            break
        out.append(matcher.push(piece))
    return "".join(out) + matcher.finish(), matcher.is_stopped


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: the stop that ends first; of those, the one that begins first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


def split_at(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@settings(max_examples=1000)
@given(
    text=st.text("ab\n", max_size=20),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_the_cut_is_the_first_stop_however_the_text_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    assert run(StopMatcher(stops), split_at(text, cuts)) == first_stop(text, stops)


@settings(max_examples=500)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_only_text_that_begins_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for number, char in enumerate(text, start=1):
        shown += matcher.push(char)
        if matcher.is_stopped:
            break
        held = text[len(shown) : number]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_of_stops_where_one_begins_another_the_shorter_one_cuts_at_the_same_place() -> None:
    assert run(StopMatcher(["ENDING", "END", "EN"]), ["say E", "N", "DING x"]) == ("say ", True)


def test_a_near_miss_at_the_end_is_given_out() -> None:
    assert run(StopMatcher(["</answer>"]), ["a </", "ans"]) == ("a </ans", False)


def ids_of(text: str) -> list[int]:
    return list(smollm2_text().tokenizer.encode(text, add_special_tokens=False))


def stream(**options: object) -> TextStream:
    return TextStream(smollm2_text().tokenizer.detokenizer(), **options)  # type: ignore[arg-type]  # the tests' own


TEXT = "One two three four five, six seven eight nine ten eleven twelve."


@pytest.mark.parametrize("width", [1, 2, 3, 8, 64])
def test_tokens_count_up_to_the_one_that_completes_the_stop(width: int) -> None:
    """A stop anywhere inside an accepted run: same text, same number of tokens, nothing after."""
    ids = ids_of(TEXT)
    tokenizer = smollm2_text().tokenizer
    for j in range(len(ids) - 1):
        stop = tokenizer.decode(ids[j : j + 2])
        if TEXT.find(stop) != len(tokenizer.decode(ids[:j])):
            continue
        texts = stream(stops=(stop,))
        pieces = [texts.push(ids[at : at + width]) for at in range(0, len(ids), width)]
        assert "".join(piece.text for piece in pieces) == TEXT[: TEXT.index(stop)]
        assert texts.num_tokens == sum(piece.num_tokens for piece in pieces) == j + 2
        assert texts.is_stopped_by_text
        assert texts.finish() == ""


def test_a_stop_that_ends_inside_a_token_takes_the_whole_token() -> None:
    ids = ids_of("alpha beta")
    texts = stream(stops=("pha b",))
    piece = texts.push(ids)
    assert piece.text == "al"
    assert piece.num_tokens == len(ids_of("alpha beta")) - len(ids_of("x beta")) + 2


def test_a_stop_token_counts_but_has_no_text() -> None:
    ids = ids_of("Hello world")
    texts = stream(stop_token_ids={ids[1]})
    assert texts.push([*ids, *ids]).num_tokens == 2
    assert texts.finish() == ""
    first = stream(stop_token_ids={ids[0]})
    assert (first.push(ids).text, first.num_tokens, first.finish()) == ("", 1, "")


def test_a_stop_token_before_min_tokens_is_text() -> None:
    ids = ids_of("Hello world")
    texts = stream(stop_token_ids={ids[0]}, min_tokens=1)
    assert texts.push([ids[0], ids[1], ids[0]]).text == "Hello world"
    assert texts.num_tokens == 3


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    ids = ids_of("one two one two")
    texts = stream(stops=("one",), min_tokens=1)
    assert texts.push(ids).text == "one two "
    assert texts.num_tokens == 3


def test_text_held_for_a_stop_comes_out_when_a_stop_token_ends_the_answer() -> None:
    ids = ids_of("wait </")
    texts = stream(stops=("</end>",), stop_token_ids={2})
    shown = texts.push([*ids, 2]).text
    assert (shown, texts.finish()) == ("wait ", "</")


def test_a_newline_stop_is_complete_with_its_byte_token() -> None:
    """Byte-fallback text waits for the end of the byte run, but the generation must stop at once."""
    cat = FALLBACK_PIECE + 4
    texts = TextStream(FALLBACK.detokenizer(), stops=("\n",))
    piece = texts.push([cat, FALLBACK_BYTE + 0x0A, cat])
    assert (piece.text, piece.num_tokens, texts.is_stopped_by_text) == ("cat", 2, True)


def test_a_stop_inside_what_finish_releases_is_found() -> None:
    texts = TextStream(FALLBACK.detokenizer(), stops=("\ufffd",))
    assert texts.push([FALLBACK_PIECE + 4, FALLBACK_BYTE + 0xE2]).text == "cat"
    assert texts.finish() == ""
    assert texts.is_stopped_by_text
