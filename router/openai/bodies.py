"""JSON bodies to values, large ones in steps between which the event loop goes on.

The decoder holds the interpreter until it is done, on any thread, so its work is cut: token ids come piece by
piece, and whatever else a body holds is bounded in how many values it has, which is what decoding costs.
Must never know what a field is for.
"""

import asyncio
from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from router.errors import BadRequest, BodyTooLarge
from router.openai.fields import decode_object, invalid_json, no_object
from router.openai.json_text import NoJson, decode_json

STEP_BYTES = 256 * 1024
"""What is decoded at once."""

MAX_VALUES = 50_000
"""Besides lists of numbers."""

_FIELDS_AT_ONCE = 256
_MAX_QUOTES = 4 * MAX_VALUES  # a key and a value are two strings
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NUMBERS = msgspec.json.Decoder(tuple[int, ...])


async def decode_body(body: bytes) -> dict[str, Any]:
    """A JSON object; long lists of integers come as tuples, which hold nothing else. Raises BadRequest."""
    steps = decode_steps(body)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            decoded: dict[str, Any] = end.value
            return decoded
        await asyncio.sleep(0)


def decode_steps(body: bytes, *, step_bytes: int = STEP_BYTES) -> Generator[None, None, dict[str, Any]]:
    """Yields after each short step. Raises BadRequest."""
    if len(body) <= step_bytes:
        return decode_object(body)
    if body.count(b'"') > _MAX_QUOTES and (yield from _without_escapes(body)).count(b'"') > _MAX_QUOTES:
        raise _too_many_values()
    yield
    if body.lstrip().startswith(b"["):
        raise no_object([])
    try:
        fields = _OBJECT.decode(body)
        yield
        return (yield from _values(fields, step_bytes))
    except (msgspec.DecodeError, RecursionError, NoJson) as error:
        raise invalid_json(error) from error


def _values(fields: Mapping[str, msgspec.Raw], step_bytes: int) -> Generator[None, None, dict[str, Any]]:
    values: dict[str, Any] = {}
    num_values = 0
    for index, (name, raw) in enumerate(fields.items()):
        text = bytes(raw)
        is_long = len(text) > step_bytes
        if is_long and text.startswith(b"[") and b'"' not in text and b"{" not in text:
            values[name] = yield from _numbers(name, text, step_bytes)
            continue
        num_values += 1 + (yield from _count_values(text))
        if num_values > MAX_VALUES:
            raise _too_many_values()
        values[name] = decode_json(text)
        if is_long or index % _FIELDS_AT_ONCE == 0:
            yield
    return values


def _numbers(
    name: str, text: bytes, step_bytes: int
) -> Generator[None, None, tuple[int, ...] | list[tuple[int, ...]]]:
    """A list of integers, or of such lists, which is valid JSON otherwise."""
    inner = text[1:-1].strip()
    if b"[" not in inner:
        return (yield from _integers(name, inner, step_bytes))
    if inner.count(b"[") > MAX_VALUES:
        raise _too_many_values()
    *parts, rest = inner.split(b"]")
    lists: list[tuple[int, ...]] = []
    for part in parts:
        head, bracket, numbers = part.partition(b"[")
        if not bracket or head.strip(b", \t\r\n") or b"[" in numbers:
            raise _not_integers(name)
        lists.append((yield from _integers(f"{name}[{len(lists)}]", numbers, step_bytes)))
    if rest:
        raise _not_integers(name)
    return lists


def _integers(name: str, text: bytes, step_bytes: int) -> Generator[None, None, tuple[int, ...]]:
    numbers: list[int] = []
    start = 0
    while start < len(text):
        end = text.find(b",", start + step_bytes)
        end = len(text) if end < 0 else end
        try:
            numbers += _NUMBERS.decode(b"[%b]" % text[start:end])
        except (msgspec.DecodeError, RecursionError) as error:
            raise _not_integers(name) from error
        start = end + 1
        yield
    return tuple(numbers)


def _count_values(text: bytes) -> Generator[None, None, int]:
    """No fewer than a value holds; what stands in strings may count where it does not matter."""
    if text.startswith(b'"'):
        return 0
    count = _count_marks(text)
    if count <= MAX_VALUES:
        return count
    yield
    bare = yield from _without_escapes(text)
    bare = b'""'.join(bare.split(b'"')[::2])
    yield
    return _count_marks(bare)


def _count_marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _without_escapes(text: bytes) -> Generator[None, None, bytes]:
    """The same quotes open and close strings, and no others are there."""
    text = text.replace(b"\\\\", b"")
    yield
    text = text.replace(b'\\"', b"")
    yield
    return text


def _too_many_values() -> BodyTooLarge:
    return BodyTooLarge(f"the body must hold at most {MAX_VALUES} JSON values besides lists of token ids")


def _not_integers(name: str) -> BadRequest:
    return BadRequest(f"{name} must hold integers only, or only lists of integers", param=name)
