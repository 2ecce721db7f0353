"""Pieces that several protobuf conversions share: required fields, ids, packed tokens, log-probabilities.

Owns the wording of malformed-field errors. Must never know a whole message.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

from engine.params import TokenLogprob
from kv_transfer.ids import Incarnation, TransferId

NUM_INT32_BYTES = 4


class TidMessage(Protocol):
    """The Tid message of either protobuf package."""

    request_id: str
    attempt: int


def malformed(field: str, value: object, rule: str) -> NoReturn:
    raise ValueError(f"{field} must be {rule}, got {value!r}")


def require(field: str, value: object, *, holds: bool, rule: str) -> None:
    if not holds:
        malformed(field, value, rule)


def unpack_tid(tid: TidMessage, field: str) -> TransferId:
    request_id = tid.request_id
    if not request_id:
        malformed(field, request_id, "set, with a request id")
    return TransferId(request_id, tid.attempt)


def unpack_incarnation(text: str, field: str) -> Incarnation:
    require(field, text, holds=bool(text), rule="set")
    return Incarnation(text)


def pack_int32s(values: Iterable[int], field: str) -> bytes:
    """Token ids as little-endian int32. Raises ValueError on an id that does not fit."""
    try:
        packed = array("i", values)
    except OverflowError as error:
        raise ValueError(f"{field} must be 32-bit integers: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(data: bytes, field: str) -> tuple[int, ...]:
    require(field, len(data), holds=len(data) % NUM_INT32_BYTES == 0, rule="a multiple of 4 bytes long")
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    lowest = min(packed, default=0)
    require(field, lowest, holds=lowest >= 0, rule="token ids of at least 0")
    return tuple(packed)


def unpack_logprob(
    logprob: float, *, top_ids: Sequence[int], top_logprobs: Sequence[float], field: str
) -> TokenLogprob:
    sizes = (len(top_ids), len(top_logprobs))
    require(f"{field}.top_logprobs", sizes[1], holds=sizes[0] == sizes[1], rule=f"{sizes[0]} values")
    return TokenLogprob(logprob, tuple(zip(top_ids, top_logprobs, strict=True)))
