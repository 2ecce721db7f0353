"""Two nodes agree, or are refused by the name of the first field that differs."""

from dataclasses import replace

import pytest

from engine.layout import KvLayout, PoolSpec, build_layout
from kv_transfer.checksums import page_checksum
from kv_transfer.geometry import Agreement, TensorSpec, check_handoff, negotiate
from kv_transfer.ids import Incarnation
from kv_transfer.messages import Handoff, Hello, NamedTensor, Refused, SemanticIdentity, TransportOffer


def layout(*, page_size: int = 16, dtype: str = "float32", heads: int = 2, draft_layers: int = 0) -> KvLayout:
    pools = [PoolSpec(pool="target", num_layers=2, num_kv_heads=heads, head_dim=8)]
    if draft_layers:
        pools.append(PoolSpec(pool="draft", num_layers=draft_layers, num_kv_heads=1, head_dim=8))
    return build_layout(page_size=page_size, dtype=dtype, pools=pools)


IDENTITY = SemanticIdentity(model="m", revision="r", weights="w", dtype="float32", tokenizer="t")


def hello(name: str, transports: tuple[str, ...] = ("memory",)) -> Hello:
    offers = tuple(TransportOffer(name=each, blob=name.encode()) for each in transports)
    return Hello(incarnation=Incarnation(name), identity=IDENTITY, layout=layout(), offers=offers)


D, P = hello("d"), hello("p")


def test_equal_nodes_agree_on_version_transport_and_the_peers_offer() -> None:
    assert negotiate(D, P, is_decode=True) == Agreement(
        version=1,
        transport="memory",
        peer_offer=P.offers[0],
        has_checksums=False,
        copy_bytes=layout().page_bytes,
    )


def test_the_decode_nodes_preference_picks_the_transport_on_both_sides() -> None:
    decode, prefill = hello("d", ("nixl", "grpc", "memory")), hello("p", ("memory", "grpc"))
    ours, theirs = negotiate(decode, prefill, is_decode=True), negotiate(prefill, decode, is_decode=False)
    assert isinstance(ours, Agreement)
    assert isinstance(theirs, Agreement)
    assert (ours.transport, theirs.transport) == ("grpc", "grpc")
    assert (ours.peer_offer.blob, theirs.peer_offer.blob) == (b"p", b"d")


def test_checksums_are_on_when_either_side_wants_them() -> None:
    outcome = negotiate(D, replace(P, checksums=True), is_decode=True)
    assert isinstance(outcome, Agreement)
    assert outcome.has_checksums


def test_the_highest_common_version_is_spoken() -> None:
    outcome = negotiate(
        replace(D, min_version=1, max_version=3), replace(P, min_version=2, max_version=5), is_decode=True
    )
    assert isinstance(outcome, Agreement)
    assert outcome.version == 3


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        (
            replace(P, min_version=2, max_version=3),
            Refused(field="wire_version", ours="1..1", theirs="2..3"),
        ),
        (
            replace(P, layout=layout(page_size=32)),
            Refused(field="page_size", ours="16", theirs="32"),
        ),
        (
            replace(P, layout=layout(dtype="bfloat16")),
            Refused(field="kv_dtype", ours="float32", theirs="bfloat16"),
        ),
        (
            replace(P, layout=layout(heads=4)),
            Refused(field="region target.0.k num_heads", ours="2", theirs="4"),
        ),
        (
            replace(P, layout=layout(draft_layers=1)),
            Refused(field="region draft.0.k", ours="absent", theirs="present"),
        ),
        (
            replace(P, layout=replace(layout(), page_bytes=1)),
            Refused(field="page_bytes", ours=str(layout().page_bytes), theirs="1"),
        ),
        (hello("p", ("grpc",)), Refused(field="transports", ours="memory", theirs="grpc")),
    ],
)
def test_the_first_field_that_differs_is_named(theirs: Hello, refused: Refused) -> None:
    assert negotiate(D, theirs, is_decode=True) == refused


def test_a_region_only_we_have_is_named_too() -> None:
    ours = replace(D, layout=layout(draft_layers=1))
    assert negotiate(ours, P, is_decode=True) == Refused(
        field="region draft.0.k", ours="present", theirs="absent"
    )


def test_the_same_regions_in_another_order_are_refused() -> None:
    shuffled = replace(layout(), regions=tuple(reversed(layout().regions)))
    outcome = negotiate(D, replace(P, layout=shuffled), is_decode=True)
    assert isinstance(outcome, Refused)
    assert outcome.field == "layout"


@pytest.mark.parametrize(
    "field",
    ["model", "revision", "weights", "dtype", "tokenizer", "draft", "draft_weights", "algorithm"],
)
def test_every_part_of_the_identity_must_be_equal(field: str) -> None:
    outcome = negotiate(D, replace(P, identity=replace(IDENTITY, **{field: "other"})), is_decode=True)
    assert isinstance(outcome, Refused)
    assert (outcome.field, outcome.theirs) == (field, "other")


DRAFTED = replace(
    D,
    identity=replace(IDENTITY, draft="head", draft_weights="h", algorithm="eagle3"),
    layout=layout(draft_layers=1),
    allow_seedless=True,
)


def test_a_decode_node_that_allows_it_pairs_over_the_targets_bytes() -> None:
    ours, theirs = negotiate(DRAFTED, P, is_decode=True), negotiate(P, DRAFTED, is_decode=False)
    assert isinstance(ours, Agreement)
    assert isinstance(theirs, Agreement)
    assert ours.copy_bytes == theirs.copy_bytes == layout().page_bytes < DRAFTED.layout.page_bytes
    assert ours.note == "seedless, draft: 'head' here, '' there"
    assert theirs.note == "seedless, draft: '' here, 'head' there"


def test_a_prefill_node_cannot_allow_it() -> None:
    prefill = replace(P, identity=DRAFTED.identity, layout=DRAFTED.layout, allow_seedless=True)
    outcome = negotiate(D, prefill, is_decode=True)
    assert outcome == Refused(field="draft", ours="", theirs="head")


def test_a_decode_node_without_a_draft_lacks_nothing_of_a_prefill_node_with_one() -> None:
    prefill = replace(P, identity=DRAFTED.identity, layout=DRAFTED.layout)
    outcome = negotiate(replace(D, allow_seedless=True), prefill, is_decode=True)
    assert isinstance(outcome, Agreement)
    assert (outcome.is_seedless, outcome.copy_bytes) == (False, layout().page_bytes)
    assert outcome.note == "target KV only, draft: '' here, 'head' there"


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (replace(P, identity=replace(IDENTITY, weights="x")), "weights"),
        (replace(P, layout=layout(page_size=32)), "page_size"),
        (replace(P, layout=layout(dtype="bfloat16")), "kv_dtype"),
        (replace(P, layout=layout(heads=4)), "region target.0.k num_heads"),
        (replace(P, layout=replace(layout(), regions=())), "region target.0.k"),
        (replace(P, layout=replace(layout(), page_bytes=1 << 20)), "target_bytes"),
    ],
)
def test_whatever_is_the_targets_must_be_equal_all_the_same(theirs: Hello, field: str) -> None:
    outcome = negotiate(DRAFTED, theirs, is_decode=True)
    assert isinstance(outcome, Refused)
    assert outcome.field == field


def test_equal_drafts_of_unequal_layout_are_refused_even_where_others_are_allowed() -> None:
    outcome = negotiate(replace(DRAFTED, layout=layout()), replace(DRAFTED), is_decode=True)
    assert outcome == Refused(field="region draft.0.k", ours="absent", theirs="present")


def handoff(**tensors: NamedTensor) -> Handoff:
    return Handoff(first_token=1, num_tokens=5, tensors=tensors)


HIDDEN = NamedTensor(dtype="float32", shape=(1, 4), data=bytes(16))
SPEC = TensorSpec(dtype="float32", shape=(1, 4))


@pytest.mark.parametrize(
    ("record", "expected", "field"),
    [
        (handoff(hidden=HIDDEN), {"hidden": SPEC}, None),
        (handoff(hidden=HIDDEN), {"hidden": None}, None),
        (handoff(), {"hidden": SPEC}, None),
        (handoff(hidden=HIDDEN), {}, "handoff.tensors"),
        (handoff(hidden=HIDDEN), {"hidden": None, "top": None}, "handoff.tensors"),
        (handoff(hidden=HIDDEN), {"hidden": replace(SPEC, shape=(1, 8))}, "handoff.hidden.shape"),
        (handoff(hidden=HIDDEN), {"hidden": replace(SPEC, dtype="bfloat16")}, "handoff.hidden.dtype"),
        (handoff(hidden=replace(HIDDEN, dtype="odd")), {"hidden": None}, "handoff.hidden.dtype"),
        (handoff(hidden=replace(HIDDEN, data=bytes(15))), {"hidden": SPEC}, "handoff.hidden.data"),
        (handoff(hidden=replace(HIDDEN, shape=(-2, -2))), {"hidden": None}, "handoff.hidden.data"),
    ],
)
def test_a_handoff_record_is_checked_by_name_dtype_shape_and_length(
    record: Handoff, expected: dict[str, TensorSpec | None], field: str | None
) -> None:
    outcome = check_handoff(record, expected)
    assert (None if outcome is None else outcome.field) == field


def test_a_page_checksum_is_its_crc_32() -> None:
    assert page_checksum(memoryview(b"123456789")) == 0xCBF43926
