"""`Hello` of a session to protobuf and back: identity, page layout, transport offers.

Owns the checks that a layout from the wire describes pages. Must never know whether the two sides fit.
"""

from engine.layout import DTYPE_BYTES, KvLayout, Region
from kv_transfer.messages import Hello, SemanticIdentity, TransportOffer
from wire.convert_fields import require, unpack_incarnation
from wire.gen import transfer_pb2 as pb


def pack_hello(hello: Hello) -> pb.Hello:
    return pb.Hello(
        incarnation=hello.incarnation,
        min_version=hello.min_version,
        max_version=hello.max_version,
        identity=_pack_identity(hello.identity),
        layout=_pack_layout(hello.layout),
        offers=[pb.Offer(name=offer.name, blob=offer.blob) for offer in hello.offers],
        checksums=hello.checksums,
        allow_seedless=hello.allow_seedless,
    )


def unpack_hello(hello: pb.Hello) -> Hello:
    require("hello.identity", None, holds=hello.HasField("identity"), rule="set")
    require("hello.layout", None, holds=hello.HasField("layout"), rule="set")
    return Hello(
        incarnation=unpack_incarnation(hello.incarnation, "hello.incarnation"),
        min_version=hello.min_version,
        max_version=hello.max_version,
        identity=_unpack_identity(hello.identity),
        layout=_unpack_layout(hello.layout),
        offers=tuple(TransportOffer(name=offer.name, blob=offer.blob) for offer in hello.offers),
        checksums=hello.checksums,
        allow_seedless=hello.allow_seedless,
    )


def _pack_identity(identity: SemanticIdentity) -> pb.Identity:
    return pb.Identity(
        model=identity.model,
        revision=identity.revision,
        weights=identity.weights,
        dtype=identity.dtype,
        tokenizer=identity.tokenizer,
        draft=identity.draft,
        draft_weights=identity.draft_weights,
        algorithm=identity.algorithm,
    )


def _unpack_identity(identity: pb.Identity) -> SemanticIdentity:
    return SemanticIdentity(
        model=identity.model,
        revision=identity.revision,
        weights=identity.weights,
        dtype=identity.dtype,
        tokenizer=identity.tokenizer,
        draft=identity.draft,
        draft_weights=identity.draft_weights,
        algorithm=identity.algorithm,
    )


def _pack_layout(layout: KvLayout) -> pb.Layout:
    regions = [
        pb.Region(
            pool=region.pool,
            layer=region.layer,
            kind=region.kind,
            offset=region.offset,
            num_heads=region.num_heads,
            head_dim=region.head_dim,
        )
        for region in layout.regions
    ]
    return pb.Layout(
        page_size=layout.page_size, dtype=layout.dtype, page_bytes=layout.page_bytes, regions=regions
    )


def _unpack_layout(layout: pb.Layout) -> KvLayout:
    require("hello.layout.page_size", layout.page_size, holds=layout.page_size > 0, rule="positive")
    dtype_rule = f"one of {sorted(DTYPE_BYTES)}"
    require("hello.layout.dtype", layout.dtype, holds=layout.dtype in DTYPE_BYTES, rule=dtype_rule)
    return KvLayout(
        page_size=layout.page_size,
        dtype=layout.dtype,
        page_bytes=layout.page_bytes,
        regions=tuple(_unpack_region(region, layout) for region in layout.regions),
    )


def _unpack_region(region: pb.Region, layout: pb.Layout) -> Region:
    field = f"hello.layout.regions[{region.pool}.{region.layer}]"
    require(f"{field}.kind", region.kind, holds=region.kind in {"k", "v"}, rule="'k' or 'v'")
    token_bytes = region.num_heads * region.head_dim * DTYPE_BYTES[layout.dtype]
    is_inside = region.offset + layout.page_size * token_bytes <= layout.page_bytes
    rule = f"such that the region ends within {layout.page_bytes} bytes"
    require(f"{field}.offset", region.offset, holds=is_inside, rule=rule)
    return Region(
        pool=region.pool,
        layer=region.layer,
        kind=region.kind,
        offset=region.offset,
        num_heads=region.num_heads,
        head_dim=region.head_dim,
    )
