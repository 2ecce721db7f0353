"""The events of a frame to protobuf and back: what comes with every token goes in columns.

A protobuf object costs several times what it holds, so the tokens of one step share one. Owns how events
stand in a frame. Must never know what they mean.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kv_transfer.ids import TransferId
from wire.convert_events import pack_event, unpack_event
from wire.convert_fields import require
from wire.gen import node_pb2 as pb
from wire.work import Event, Tokens


def pack_events(events: Iterable[Event]) -> list[pb.Event]:
    """Order stays as it is."""
    packed: list[pb.Event] = []
    for is_plain, neighbours in groupby(events, key=_is_plain):
        if is_plain:
            rounds = [one for one in neighbours if isinstance(one, Tokens)]
            packed.append(pb.Event(rounds=_pack_rounds(rounds)))
        else:
            packed += map(pack_event, neighbours)
    return packed


def unpack_events(packed: Iterable[pb.Event]) -> tuple[Event, ...]:
    """Raises ValueError naming the field."""
    events: list[Event] = []
    for one in packed:
        if one.HasField("rounds"):
            events += _unpack_rounds(one.rounds)
        else:
            events.append(unpack_event(one))
    return tuple(events)


def _is_plain(event: Event) -> bool:
    return isinstance(event, Tokens) and event.logprobs is None


def _pack_rounds(rounds: Sequence[Tokens]) -> pb.Rounds:
    return pb.Rounds(
        request_ids=[one.tid.request_id for one in rounds],
        attempts=[one.tid.attempt for one in rounds],
        first_indices=[one.first_index for one in rounds],
        num_ids=[len(one.ids) for one in rounds],
        ids=[token_id for one in rounds for token_id in one.ids],
        drafted=[one.drafted for one in rounds],
        accepted=[one.accepted for one in rounds],
    )


def _unpack_rounds(rounds: pb.Rounds) -> Iterator[Tokens]:
    # A slice takes a column at once; iterating would take its values one by one.
    request_ids, num_ids, ids = rounds.request_ids[:], rounds.num_ids[:], tuple(rounds.ids[:])
    columns = (rounds.attempts[:], rounds.first_indices[:], num_ids, rounds.drafted[:], rounds.accepted[:])
    for column in columns:
        holds = len(column) == len(request_ids)
        require("rounds", len(column), holds=holds, rule=f"columns of {len(request_ids)} values")
    require("rounds.request_ids", request_ids, holds=all(request_ids), rule="request ids")
    require("rounds.num_ids", sum(num_ids), holds=sum(num_ids) == len(ids), rule=f"{len(ids)} in all")
    start = 0
    for request_id, attempt, first, length, drafted, accepted in zip(request_ids, *columns, strict=True):
        yield Tokens(
            tid=TransferId(request_id, attempt),
            first_index=first,
            ids=ids[start : start + length],
            drafted=drafted,
            accepted=accepted,
        )
        start += length
