"""Do two nodes fit together: two Hellos in, the terms of the pair or the first field that differs out.

Owns that comparison and the check of a handoff record's tensors. Must never know a session, a proposer
or a transport's connection blob. Nothing here raises for what a peer sent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final as Constant

from engine.layout import KvLayout, Region
from kv_transfer.messages import Handoff, Hello, NamedTensor, Refused, SemanticIdentity, TransportOffer

_ELEMENT_BYTES: Constant[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The terms of a pair; both sides come to the same ones.

    draft_differs: what of the drafts differs, where the decode node allows that; then only the target's
        regions travel, the first `copy_bytes` of every page.
    is_seedless: the decode node's draft needs of the prompt what does not come.
    """

    version: int
    transport: str
    peer_offer: TransportOffer  # for `Transport.connect`
    has_checksums: bool  # when either side wants them
    copy_bytes: int
    draft_differs: Refused | None = None
    is_seedless: bool = False

    @property
    def note(self) -> str:
        """What an operator should know of the pair; empty when there is nothing."""
        if self.draft_differs is None:
            return ""
        return f"{'seedless' if self.is_seedless else 'target KV only'}, {self.draft_differs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a proposer expects one of its handoff tensors to be."""

    dtype: str
    shape: tuple[int, ...]


def negotiate(ours: Hello, theirs: Hello, *, is_decode: bool) -> Agreement | Refused:
    """Compare two Hellos; `is_decode` says that `ours` is the decode node's.

    The version is the highest both speak. The transport is the first in the decode node's order of
    preference that the prefill node offers too. A layout must be equal, as whole pages are what travels;
    where the decode node allows another draft, only the target's part must.
    """
    decode = ours if is_decode else theirs
    differs = _compare_drafts(ours.identity, theirs.identity)
    refused = (
        _compare_versions(ours, theirs)
        or _compare_targets(ours.identity, theirs.identity)
        or (None if decode.allow_seedless else differs)
        or _compare_layout(ours.layout, theirs.layout, is_target_only=differs is not None)
    )
    if refused is not None:
        return refused
    name = _common_transport(ours, theirs) if is_decode else _common_transport(theirs, ours)
    if name is None:
        return Refused(field="transports", ours=_offered(ours), theirs=_offered(theirs))
    return Agreement(
        version=min(ours.max_version, theirs.max_version),
        transport=name,
        peer_offer=next(offer for offer in theirs.offers if offer.name == name),
        has_checksums=ours.checksums or theirs.checksums,
        copy_bytes=ours.layout.page_bytes if differs is None else ours.layout.target_bytes,
        draft_differs=differs,
        is_seedless=differs is not None and decode.identity.algorithm != "",
    )


def check_handoff(handoff: Handoff, expected: Mapping[str, TensorSpec | None]) -> Refused | None:
    """Is the record what the proposer can take: None, or the first field that differs.

    `expected` maps the proposer's tensor names to what they must be, None where only the name is known.
    A record without any tensors is fine (the first round then verifies the root alone); one with some
    missing, with unknown ones, or whose data is not as long as its shape says, is not.
    """
    if not handoff.tensors:
        return None
    if set(handoff.tensors) != set(expected):
        return Refused(
            field="handoff.tensors", ours=",".join(sorted(expected)), theirs=",".join(sorted(handoff.tensors))
        )
    for name, spec in expected.items():
        refused = _check_tensor(f"handoff.{name}", handoff.tensors[name], spec)
        if refused is not None:
            return refused
    return None


def _check_tensor(name: str, tensor: NamedTensor, spec: TensorSpec | None) -> Refused | None:
    if spec is not None and tensor.dtype != spec.dtype:
        return Refused(field=f"{name}.dtype", ours=spec.dtype, theirs=tensor.dtype)
    if spec is not None and tensor.shape != spec.shape:
        return Refused(field=f"{name}.shape", ours=str(spec.shape), theirs=str(tensor.shape))
    if tensor.dtype not in _ELEMENT_BYTES:
        return Refused(field=f"{name}.dtype", ours=",".join(_ELEMENT_BYTES), theirs=tensor.dtype)
    num_bytes = math.prod(tensor.shape) * _ELEMENT_BYTES[tensor.dtype]
    if min(tensor.shape, default=0) < 0 or len(tensor.data) != num_bytes:
        return Refused(field=f"{name}.data", ours=f"{num_bytes} bytes", theirs=f"{len(tensor.data)} bytes")
    return None


def _compare_versions(ours: Hello, theirs: Hello) -> Refused | None:
    if max(ours.min_version, theirs.min_version) <= min(ours.max_version, theirs.max_version):
        return None
    return Refused(
        field="wire_version",
        ours=f"{ours.min_version}..{ours.max_version}",
        theirs=f"{theirs.min_version}..{theirs.max_version}",
    )


def _compare_targets(ours: SemanticIdentity, theirs: SemanticIdentity) -> Refused | None:
    return _first_difference(
        ("model", ours.model, theirs.model),
        ("revision", ours.revision, theirs.revision),
        ("weights", ours.weights, theirs.weights),
        ("dtype", ours.dtype, theirs.dtype),
        ("tokenizer", ours.tokenizer, theirs.tokenizer),
    )


def _compare_drafts(ours: SemanticIdentity, theirs: SemanticIdentity) -> Refused | None:
    return _first_difference(
        ("draft", ours.draft, theirs.draft),
        ("draft_weights", ours.draft_weights, theirs.draft_weights),
        ("algorithm", ours.algorithm, theirs.algorithm),
    )


def _compare_layout(ours: KvLayout, theirs: KvLayout, *, is_target_only: bool) -> Refused | None:
    """Page size, dtype, then regions by name, so that the refusal names what really differs."""
    if ours.fingerprint == theirs.fingerprint:
        return None
    refused = _first_difference(
        ("page_size", ours.page_size, theirs.page_size), ("kv_dtype", ours.dtype, theirs.dtype)
    )
    if refused is not None:
        return refused
    if is_target_only:
        return _compare_regions(ours.target_regions, theirs.target_regions) or _first_difference(
            ("target_bytes", ours.target_bytes, theirs.target_bytes),
        )
    return _compare_regions(ours.regions, theirs.regions) or _first_difference(
        ("page_bytes", ours.page_bytes, theirs.page_bytes),
        ("layout", ours.fingerprint, theirs.fingerprint),
    )


def _compare_regions(ours: tuple[Region, ...], theirs: tuple[Region, ...]) -> Refused | None:
    their_regions = {region.name: region for region in theirs}
    for region in ours:
        refused = _compare_region(region, their_regions.pop(region.name, None))
        if refused is not None:
            return refused
    unknown = next(iter(their_regions), None)
    return None if unknown is None else Refused(field=f"region {unknown}", ours="absent", theirs="present")


def _compare_region(ours: Region, theirs: Region | None) -> Refused | None:
    name = f"region {ours.name}"
    if theirs is None:
        return Refused(field=name, ours="present", theirs="absent")
    return _first_difference(
        (f"{name} num_heads", ours.num_heads, theirs.num_heads),
        (f"{name} head_dim", ours.head_dim, theirs.head_dim),
        (f"{name} offset", ours.offset, theirs.offset),
    )


def _first_difference(*fields: tuple[str, object, object]) -> Refused | None:
    for name, ours, theirs in fields:
        if ours != theirs:
            return Refused(field=name, ours=str(ours), theirs=str(theirs))
    return None


def _common_transport(decode: Hello, prefill: Hello) -> str | None:
    offered = {offer.name for offer in prefill.offers}
    return next((offer.name for offer in decode.offers if offer.name in offered), None)


def _offered(hello: Hello) -> str:
    return ",".join(offer.name for offer in hello.offers)
