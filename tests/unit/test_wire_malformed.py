import math
from typing import Any

import pytest

from engine.layout import PoolSpec, build_layout
from engine.params import SamplingParams
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import (
    Final,
    Handoff,
    Hello,
    NamedTensor,
    Reserve,
    SemanticIdentity,
)
from wire.convert import (
    pack_from_node,
    pack_to_decode,
    pack_to_node,
    pack_to_prefill,
    unpack_from_node,
    unpack_record,
    unpack_to_decode,
    unpack_to_node,
    unpack_to_prefill,
)
from wire.gen import node_pb2, transfer_pb2
from wire.work import (
    Finished,
    Frame,
    Submit,
    Tokens,
    Unreadable,
)

TID = TransferId("r", 1)


@pytest.mark.parametrize("wanted", [None, 0, 5])
def test_logprobs_wanted_none_zero_and_some_stay_apart(wanted: int | None) -> None:
    sampling = SamplingParams(seed=1, max_tokens=1, logprobs=wanted)
    submit = Submit(
        tid=TID, prompt_ids=(1,), num_prompt_tokens=1, sampling=sampling, peer=None, deadline_s=1.0
    )
    received = unpack_to_node(pack_to_node(submit))
    assert isinstance(received, Submit)
    assert received.sampling.logprobs == wanted


@pytest.mark.parametrize("token", [None, 0, 2])
def test_stop_token_none_and_zero_stay_apart(token: int | None) -> None:
    frame = Frame(step=1, events=(Finished(tid=TID, reason="stop", stop_token_id=token),))
    assert unpack_from_node(pack_from_node(frame)) == frame


@pytest.mark.parametrize("checksums", [None, ()])
def test_checksums_none_and_empty_stay_apart(checksums: tuple[int, ...] | None) -> None:
    final = Final(tid=TID, ranges=(), handoff=Handoff(first_token=1, num_tokens=4), checksums=checksums)
    received = unpack_to_decode(pack_to_decode(final))
    assert isinstance(received, Final)
    assert received.checksums == checksums


def test_prompt_ids_are_little_endian_int32() -> None:
    sampling = SamplingParams(seed=1, max_tokens=1)
    submit = Submit(
        tid=TID, prompt_ids=(1, 258), num_prompt_tokens=2, sampling=sampling, peer=None, deadline_s=1.0
    )
    assert pack_to_node(submit).submit.prompt_ids == b"\x01\0\0\0\x02\x01\0\0"


def packed_submit() -> node_pb2.ToNode:
    sampling = SamplingParams(seed=1, max_tokens=1)
    return pack_to_node(
        Submit(tid=TID, prompt_ids=(1,), num_prompt_tokens=1, sampling=sampling, peer=None, deadline_s=1.0)
    )


def test_malformed_work_messages_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"to_node.message must be set, got None"):
        unpack_to_node(node_pb2.ToNode())
    with pytest.raises(ValueError, match=r"from_node.message must be set, got None"):
        unpack_from_node(node_pb2.FromNode())
    message = packed_submit()
    message.submit.prompt_ids = b"abc"
    assert unpack_to_node(message) == Unreadable(
        tid=TID, reason="submit.prompt_ids must be a multiple of 4 bytes long, got 3"
    )
    message.submit.prompt_ids = b"\xff\xff\xff\xff"
    assert unpack_to_node(message) == Unreadable(
        tid=TID, reason="submit.prompt_ids must be token ids of at least 0, got -1"
    )
    message = packed_submit()
    message.submit.num_prompt_tokens = 2
    assert unpack_to_node(message) == Unreadable(
        tid=TID, reason="submit.num_prompt_tokens must be at most 1, got 2"
    )
    message = packed_submit()
    message.submit.sampling.temperature = 9.0
    assert unpack_to_node(message) == Unreadable(tid=TID, reason="temperature must be in [0, 2], got 9.0")
    message = packed_submit()
    message.submit.ClearField("sampling")
    assert unpack_to_node(message) == Unreadable(tid=TID, reason="submit.sampling must be set, got None")


def test_a_submit_without_a_tid_can_be_refused_to_nobody() -> None:
    message = packed_submit()
    message.submit.prompt_ids = b"abc"
    message.submit.ClearField("tid")
    with pytest.raises(ValueError, match=r"submit.tid must be set"):
        unpack_to_node(message)


def test_an_event_without_content_names_the_field() -> None:
    event = node_pb2.Event(tid=node_pb2.Tid(request_id="r", attempt=1))
    with pytest.raises(ValueError, match=r"event.event must be set"):
        unpack_from_node(node_pb2.FromNode(frame=node_pb2.Frame(step=1, events=[event])))


@pytest.mark.parametrize(
    ("column", "values", "refusal"),
    [
        ("attempts", [1], "rounds must be columns of 2 values, got 1"),
        ("request_ids", ["a", ""], "rounds.request_ids must be request ids"),
        ("num_ids", [1, 1], "rounds.num_ids must be 3 in all, got 2"),
    ],
)
def test_columns_that_do_not_fit_name_the_field(column: str, values: list[Any], refusal: str) -> None:
    columns: dict[str, Any] = {
        "request_ids": ["a", "b"],
        "attempts": [1, 1],
        "first_indices": [0, 5],
        "num_ids": [1, 2],
        "ids": [7, 8, 9],
        "drafted": [0, 3],
        "accepted": [0, 1],
    }
    frame = Frame(
        step=1,
        events=(
            Tokens(tid=TransferId("a", 1), first_index=0, ids=(7,)),
            Tokens(tid=TransferId("b", 1), first_index=5, ids=(8, 9), drafted=3, accepted=1),
        ),
    )

    def message(rounds: node_pb2.Rounds) -> node_pb2.FromNode:
        return node_pb2.FromNode(frame=node_pb2.Frame(step=1, events=[node_pb2.Event(rounds=rounds)]))

    assert unpack_from_node(message(node_pb2.Rounds(**columns))) == frame
    with pytest.raises(ValueError, match=refusal):
        unpack_from_node(message(node_pb2.Rounds(**columns | {column: values})))


def packed_hello() -> transfer_pb2.ToPrefill:
    layout = build_layout(
        page_size=2,
        dtype="float32",
        pools=[PoolSpec(pool="target", num_layers=1, num_kv_heads=1, head_dim=16)],
    )
    identity = SemanticIdentity(model="m", revision="", weights="w", dtype="float32", tokenizer="t")
    return pack_to_prefill(Hello(incarnation=Incarnation("i"), identity=identity, layout=layout, offers=()))


def test_malformed_hellos_name_the_field() -> None:
    message = packed_hello()
    message.hello.layout.dtype = "float8"
    with pytest.raises(ValueError, match=r"hello.layout.dtype must be one of .*, got 'float8'"):
        unpack_to_prefill(message)
    message = packed_hello()
    message.hello.layout.regions[1].offset = 256
    with pytest.raises(ValueError, match=r"hello.layout.regions\[target.0\].offset must be .*, got 256"):
        unpack_to_prefill(message)
    message = packed_hello()
    message.hello.incarnation = ""
    with pytest.raises(ValueError, match=r"hello.incarnation must be set, got ''"):
        unpack_to_prefill(message)


def test_malformed_session_messages_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"to_prefill.message must be set"):
        unpack_to_prefill(transfer_pb2.ToPrefill())
    with pytest.raises(ValueError, match=r"to_decode.message must be set"):
        unpack_to_decode(transfer_pb2.ToDecode())
    reserve = pack_to_prefill(Reserve(tid=TID, page_ids=(1,), skip_tokens=0, deadline_s=math.nan))
    with pytest.raises(ValueError, match=r"reserve.deadline_s must be finite, got nan"):
        unpack_to_prefill(reserve)
    tensor = NamedTensor(dtype="float32", shape=(2,), data=bytes(8))
    final = Final(
        tid=TID, ranges=((0, 1),), handoff=Handoff(first_token=1, num_tokens=4, tensors={"h": tensor})
    )
    message = pack_to_decode(final)
    message.final.handoff.tensors["h"].dtype = "complex"
    with pytest.raises(ValueError, match=r"tensors\['h'\].dtype must be one of .*, got 'complex'"):
        unpack_to_decode(message)
    message = pack_to_decode(final)
    message.final.handoff.tensors["h"].data = bytes(7)
    with pytest.raises(ValueError, match=r"tensors\['h'\].data must be 8 bytes for shape \(2,\), got 7"):
        unpack_to_decode(message)
    message = pack_to_decode(final)
    message.final.has_checksums = True
    with pytest.raises(ValueError, match=r"final.checksums must be 1 values, got 0"):
        unpack_to_decode(message)
    message = pack_to_decode(final)
    message.final.ranges[0].stop = 0
    with pytest.raises(ValueError, match=r"final.ranges must be half-open and not empty, got \(0, 0\)"):
        unpack_to_decode(message)


def test_a_registry_value_that_is_no_record_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"record must be a serialized NodeRecord"):
        unpack_record(b"\xff\xff\xff")
    with pytest.raises(ValueError, match=r"record.role must be set"):
        unpack_record(b"")
