"""Large bodies: the same values as ever, in steps between which the event loop goes on."""

import asyncio
import json
import random
import re
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import BadRequest, BodyTooLarge
from router.openai.bodies import MAX_VALUES, STEP_BYTES, decode_body, decode_steps
from router.openai.fields import decode_object
from router.openai.requests import read_completion
from router.openai.tokenizing import read_detokenize

IDS = [random.Random(1).randrange(49152) for _ in range(200_000)]
TEXT = 'He said, "yes, [no], {maybe}", and left\\.\n' * 60_000


def run(steps: Generator[None, None, dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """What was decoded, in how many steps."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def plain(value: Any) -> Any:
    """With lists for tuples."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


BODIES: dict[str, Any] = {
    "one prompt": {"prompt": IDS, "max_tokens": 5},
    "many prompts": {"prompt": [IDS[i : i + 2000] for i in range(0, len(IDS), 2000)], "n": 2},
    "an empty one among them": {"prompt": [[], IDS, []]},
    "text full of marks": {"prompt": TEXT},
    "a conversation": {"messages": [{"role": "user", "content": TEXT[:9000]} for _ in range(100)]},
    "both": {"messages": [{"role": "user", "content": TEXT}], "allowed_token_ids": IDS},
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_large_body_has_the_values_a_small_one_would(name: str, indent: int | None) -> None:
    body = json.dumps(BODIES[name], indent=indent).encode()
    assert len(body) > 2 * STEP_BYTES
    value, num_steps = run(decode_steps(body))
    assert plain(value) == BODIES[name]
    assert num_steps > 2


def test_token_ids_are_decoded_piece_by_piece() -> None:
    body = json.dumps({"prompt": IDS}).encode()
    value, num_steps = run(decode_steps(body))
    assert value["prompt"] == tuple(IDS)
    assert num_steps >= len(body) // STEP_BYTES
    assert run(decode_steps(body[:100] + b"]}"))[1] == 1


async def test_the_loop_turns_between_the_steps() -> None:
    body, turns = json.dumps({"prompt": IDS}).encode(), 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    await decode_body(body)
    turning.cancel()
    assert turns >= len(body) // STEP_BYTES


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b'{"a":[' + b"[1]," * 100_000 + b"[1]]}", BodyTooLarge, "at most 50000 JSON values"),
        (b'{"a":[' + b'"",' * 400_000 + b'""]}', BodyTooLarge, "at most 50000 JSON values"),
        (b'{"a":[' + b'"a",' * 80_000 + b'""]}', BodyTooLarge, "at most 50000 JSON values"),
        (b'{"a":[' + b"{}," * 100_000 + b"{}]}", BodyTooLarge, "at most 50000 JSON values"),
        (b'{"a":{"b":[' + b"1," * 200_000 + b"1]}}", BodyTooLarge, "at most 50000 JSON values"),
        (b'{"a":["",' + b"1," * 200_000 + b"1]}", BodyTooLarge, "at most 50000 JSON values"),
        (json.dumps({f"k{i}": 1 for i in range(60_000)}).encode(), BodyTooLarge, "at most 50000 JSON values"),
        (b'{"prompt":[' + b"1," * 200_000 + b"1.5]}", BadRequest, "^prompt must hold integers only"),
        (b'{"prompt":[' + b"1," * 200_000 + b"null]}", BadRequest, "^prompt must hold integers only"),
        (b'{"prompt":[[1],[' + b"1," * 200_000 + b"true]]}", BadRequest, r"^prompt\[1\] must hold integers"),
        (b'{"prompt":[[1],' + b"1," * 200_000 + b"1]}", BadRequest, "^prompt must hold integers only"),
        (b'{"prompt":[[[' + b"1," * 200_000 + b"1]]]}", BadRequest, "^prompt must hold integers only"),
        (b'{"prompt":[' + b"1," * 200_000 + b"]}", BadRequest, "^the body must be valid JSON"),
        (b'{"prompt":[' + b"1," * 200_000, BadRequest, "^the body must be valid JSON"),
        (b'{"prompt":"' + b"a" * 300_000 + b'\xff"}', BadRequest, "^the body must be valid JSON"),
        (b'{"prompt":' + b"1" * 300_000 + b"}", BadRequest, "^the body must be valid JSON"),
        (b'{"prompt":1' + b"0" * 300_000 + b".0}", BadRequest, "^the body must be valid JSON"),
        (b"[" * 300_000, BadRequest, "^the body must be"),
        (b'{"a":' + b"[" * 300_000, BadRequest, "^the body must be valid JSON"),
        (b" [" + b"1," * 200_000 + b"1]", BadRequest, "^the body must be a JSON object, got a list"),
        (b'"' + b"a" * 300_000 + b'"', BadRequest, "^the body must be"),
    ],
)
def test_what_would_take_long_or_means_nothing_is_refused(
    body: bytes, error: type[BadRequest], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(decode_steps(body))


def test_the_bound_is_on_values_not_on_bytes() -> None:
    good = {"a": ["x" * 100] * (MAX_VALUES - 10)}
    assert run(decode_steps(json.dumps(good).encode()))[0] == good


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=15,
)
integers = st.lists(st.integers(-5, 2**40), max_size=30)
objects = st.dictionaries(
    st.text(max_size=3), json_values | integers | st.lists(integers, max_size=5), max_size=5
)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    value=objects,
    indent=st.sampled_from([None, 0, 2]),
    step_bytes=st.integers(1, 40),
    spoilt=st.none() | st.tuples(st.integers(0, 200), st.sampled_from(list('[]{},:"1\\ '))),
)
def test_however_it_is_cut_the_values_are_those_of_the_plain_decoder(
    value: dict[str, Any], indent: int | None, step_bytes: int, spoilt: tuple[int, str] | None
) -> None:
    """But lists that begin like token ids and hold something else too, which nothing takes, are refused."""
    text = json.dumps(value, indent=indent)
    if spoilt is not None:
        text = text[: spoilt[0]] + spoilt[1] + text[spoilt[0] + 1 :]
    body = text.encode()
    try:
        expected = decode_object(body)
    except BadRequest:
        with pytest.raises(BadRequest):
            run(decode_steps(body, step_bytes=step_bytes))
        return
    try:
        found = run(decode_steps(body, step_bytes=step_bytes))[0]
    except BadRequest as error:
        param = str(error.param)  # a field, or one list in it
        blamed = [name for name in expected if re.fullmatch(rf"{re.escape(name)}(\[\d+\])?", param)]
        assert any(is_mixed(expected[name]) for name in blamed), param
        return
    assert plain(found) == expected
    assert found.keys() == expected.keys()


def is_mixed(value: Any) -> bool:
    return isinstance(value, list) and not all(type(one) is int for one in value)


def test_readers_take_what_the_decoder_vouches_for() -> None:
    assert read_completion({"prompt": (1, 2)}).prompts == ((1, 2),)
    several = read_completion({"prompt": [(1, 2), (3,)], "allowed_token_ids": (4, 5)})
    assert (several.prompts, several.is_list) == (((1, 2), (3,)), True)
    assert several.wishes.options.allowed_token_ids == (4, 5)
    assert read_detokenize({"tokens": (1, 2)}).ids == (1, 2)
    for fields in ({"stop": (1, 2)}, {"max_tokens": (1, 2)}):
        with pytest.raises(BadRequest, match=r"got \[1,2\]"):
            read_completion({"prompt": "hi", **fields})
