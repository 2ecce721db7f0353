from hypothesis import given
from hypothesis import strategies as st

from engine.layout import DTYPE_BYTES, KvLayout, PoolSpec, build_layout
from engine.params import SamplingParams, TokenLogprob
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import (
    CancelTransfer,
    Drained,
    Final,
    Handoff,
    Heartbeat,
    Hello,
    NamedTensor,
    Planned,
    Refused,
    Renew,
    Reserve,
    SemanticIdentity,
    TransferFailed,
    TransportOffer,
)
from wire.convert import (
    pack_from_node,
    pack_record,
    pack_status,
    pack_to_decode,
    pack_to_node,
    pack_to_prefill,
    unpack_from_node,
    unpack_record,
    unpack_status,
    unpack_to_decode,
    unpack_to_node,
    unpack_to_prefill,
)
from wire.gen import node_pb2, transfer_pb2
from wire.host_events import NodeStatus
from wire.records import Load, NodeRecord
from wire.work import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Frame,
    NodeRef,
    Preempted,
    PromptInfo,
    PromptLogprobs,
    Rejected,
    Submit,
    Tokens,
    WorkHello,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
int31 = st.integers(0, 2**31 - 1)
double = st.floats(allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
name = st.text(max_size=8)
some_name = st.text(min_size=1, max_size=8)
incarnation = some_name.map(Incarnation)
tid = st.builds(TransferId, some_name, uint32)
token_ids = st.lists(uint32, max_size=5).map(tuple)
logprob = st.builds(TokenLogprob, double, st.lists(st.tuples(uint32, double), max_size=3).map(tuple))

work_hello = st.builds(WorkHello, incarnation=incarnation, role=name, version=uint32)
cancel = st.builds(Cancel, tid=tid)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**32 - 1))
    bias = st.tuples(uint32, st.floats(-100, 100))
    return SamplingParams(
        seed=draw(uint64),
        max_tokens=max_tokens,
        temperature=draw(st.floats(0, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(uint32),
        min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0, 2, exclude_min=True)),
        min_tokens=draw(st.integers(0, max_tokens)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        stop_token_ids=draw(token_ids),
        logit_bias=tuple(draw(st.lists(bias, max_size=3))),
        allowed_token_ids=draw(token_ids),
        banned_sequences=tuple(draw(st.lists(token_ids.filter(bool), max_size=3))),
    )


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    prompt_ids = tuple(draw(st.lists(int31, max_size=6)))
    return Submit(
        tid=draw(tid),
        prompt_ids=prompt_ids,
        num_prompt_tokens=draw(st.integers(0, len(prompt_ids))),
        sampling=draw(sampling_params()),
        peer=draw(st.none() | st.builds(NodeRef, address=name, incarnation=incarnation)),
        deadline_s=draw(double),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        cache_salt=draw(name),
        grammar=draw(name),
        trace_context=draw(name),
    )


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    ids = draw(token_ids)
    logprobs = st.lists(logprob, min_size=len(ids), max_size=len(ids)).map(tuple)
    return Tokens(
        tid=draw(tid),
        first_index=draw(uint32),
        ids=ids,
        logprobs=draw(st.none() | logprobs),
        drafted=draw(uint32),
        accepted=draw(uint32),
    )


events = st.one_of(
    st.builds(Accepted, tid=tid, queued_behind=uint32),
    st.builds(Rejected, tid=tid, code=name, retryable=st.booleans(), reason=name),
    st.builds(PromptInfo, tid=tid, cached_tokens=uint32),
    st.builds(PromptLogprobs, tid=tid, first_index=uint32, logprobs=st.lists(logprob, max_size=3).map(tuple)),
    tokens(),
    st.builds(
        Finished,
        tid=tid,
        reason=name,
        stop_token_id=st.none() | uint32,
        kv_bytes=uint64,
        transport=name,
        queue_s=double,
        compute_s=double,
        transfer_s=double,
        num_steps=uint32,
    ),
    st.builds(Preempted, tid=tid, next_index=uint32),
    st.builds(Failed, tid=tid, code=name, retryable=st.booleans(), reason=name),
)
frame = st.builds(Frame, step=uint64, events=st.lists(events | tokens(), max_size=6).map(tuple))


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    size = st.integers(1, 4)
    pools = [
        PoolSpec(pool=pool, num_layers=draw(size), num_kv_heads=draw(size), head_dim=draw(size))
        for pool in draw(st.sampled_from([["target"], ["target", "draft"]]))
    ]
    return build_layout(page_size=draw(size), dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))), pools=pools)


hello = st.builds(
    Hello,
    incarnation=incarnation,
    identity=st.builds(
        SemanticIdentity,
        model=name,
        revision=name,
        weights=name,
        dtype=name,
        tokenizer=name,
        draft=name,
        draft_weights=name,
        algorithm=name,
    ),
    layout=layouts(),
    offers=st.lists(st.builds(TransportOffer, name=name, blob=st.binary(max_size=8)), max_size=3).map(tuple),
    min_version=uint32,
    max_version=uint32,
    checksums=st.booleans(),
)


@st.composite
def tensors(draw: st.DrawFn) -> NamedTensor:
    dtype, size = draw(st.sampled_from([("float32", 4), ("bfloat16", 2), ("int64", 8), ("bool", 1)]))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    num_bytes = size
    for length in shape:
        num_bytes *= length
    return NamedTensor(dtype=dtype, shape=shape, data=draw(st.binary(min_size=num_bytes, max_size=num_bytes)))


handoff = st.builds(
    Handoff,
    first_token=uint32,
    first_logprob=st.none() | logprob,
    num_tokens=uint32,
    cached_tokens=uint32,
    tensors=st.dictionaries(name, tensors(), max_size=2),
    queue_s=double,
    compute_s=double,
)


@st.composite
def finals(draw: st.DrawFn) -> Final:
    pages = st.tuples(st.integers(0, 20), st.integers(1, 4)).map(lambda one: (one[0], one[0] + one[1]))
    ranges = tuple(draw(st.lists(pages, max_size=3)))
    count = sum(stop - start for start, stop in ranges)
    checksums = st.lists(uint32, min_size=count, max_size=count).map(tuple)
    return Final(tid=draw(tid), ranges=ranges, handoff=draw(handoff), checksums=draw(st.none() | checksums))


to_prefill = st.one_of(
    hello,
    st.builds(Reserve, tid=tid, page_ids=token_ids, skip_tokens=uint32, deadline_s=finite),
    st.builds(Renew, tids=st.lists(tid, max_size=3).map(tuple)),
    st.builds(CancelTransfer, tid=tid),
)
to_decode = st.one_of(
    hello,
    st.builds(Refused, field=name, ours=name, theirs=name),
    st.builds(Planned, tid=tid, num_tokens=uint32),
    finals(),
    st.builds(TransferFailed, tid=tid, code=name, reason=name),
    st.builds(Drained, tid=tid),
    st.builds(Heartbeat, engine_step=uint64),
)
load = st.builds(
    Load, free_pages=uint32, total_pages=uint32, running=uint32, waiting=uint32, queued_tokens=uint64
)
record = st.builds(
    NodeRecord,
    role=some_name,
    address=some_name,
    incarnation=incarnation,
    model=name,
    layout=name,
    page_size=uint32,
    max_model_len=uint32,
    vocab_size=uint32,
    transports=st.lists(name, max_size=3).map(tuple),
    eos_token_ids=token_ids,
    started_at=double,
    is_draining=st.booleans(),
    load=load,
)
status = st.builds(
    NodeStatus,
    step=uint64,
    load=load,
    quarantined_pages=uint32,
    is_draining=st.booleans(),
    is_idle=st.booleans(),
    integrity=name,
    counters=st.dictionaries(name, double, max_size=3),
    peers=st.dictionaries(name, name, max_size=3),
)


@given(work_hello | submits() | cancel)
def test_every_message_to_a_node_survives_the_wire(message: WorkHello | Submit | Cancel) -> None:
    data = pack_to_node(message).SerializeToString()
    assert unpack_to_node(node_pb2.ToNode.FromString(data)) == message


@given(work_hello | frame)
def test_every_message_from_a_node_survives_the_wire(message: WorkHello | Frame) -> None:
    data = pack_from_node(message).SerializeToString()
    assert unpack_from_node(node_pb2.FromNode.FromString(data)) == message


@given(to_prefill)
def test_every_message_to_prefill_survives_the_wire(
    message: Hello | Reserve | Renew | CancelTransfer,
) -> None:
    data = pack_to_prefill(message).SerializeToString()
    assert unpack_to_prefill(transfer_pb2.ToPrefill.FromString(data)) == message


@given(to_decode)
def test_every_message_to_decode_survives_the_wire(message: Hello | Refused | Planned | Final) -> None:
    data = pack_to_decode(message).SerializeToString()
    assert unpack_to_decode(transfer_pb2.ToDecode.FromString(data)) == message


@given(record)
def test_every_node_record_survives_the_registry(message: NodeRecord) -> None:
    assert unpack_record(pack_record(message)) == message


@given(status)
def test_every_status_survives_the_wire(message: NodeStatus) -> None:
    packed = pack_status(message, role="decode", address="d:1", incarnation=Incarnation("inc"))
    received = node_pb2.StatusResponse.FromString(packed.SerializeToString())
    assert unpack_status(received) == message
    assert (received.role, received.address, received.incarnation) == ("decode", "d:1", "inc")
