"""What a decode and a prefill node say to each other on a session (PROTOCOL.md, "D <-> P: Session").

Plain values: `wire` turns them into protobuf, the simulation passes them as they are.
Page ranges are half-open, in pages of the request: page i holds tokens [i*page_size, (i+1)*page_size).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from engine.layout import KvLayout
from engine.params import TokenLogprob
from kv_transfer.ids import Incarnation, TransferId

WIRE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticIdentity:
    """What must be equal on both sides for a page to mean the same; compared field by field."""

    model: str
    revision: str
    weights: str  # fingerprint of the weight values
    dtype: str
    tokenizer: str
    draft: str = ""
    draft_weights: str = ""
    algorithm: str = ""  # empty when the drafter needs nothing from prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOffer:
    """One data plane a node can speak, with what the peer needs to connect to it."""

    name: str
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    incarnation: Incarnation
    identity: SemanticIdentity
    layout: KvLayout
    offers: tuple[TransportOffer, ...]  # in order of preference
    min_version: int = WIRE_VERSION
    max_version: int = WIRE_VERSION
    checksums: bool = False
    allow_seedless: bool = False  # D's word: another draft on P, or none, will do


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The pair cannot work together: which field differs, and both values.

    is_transient: nothing differs, the data plane could not be connected this time; try again.
    """

    field: str
    ours: str
    theirs: str
    is_transient: bool = False

    def __str__(self) -> str:
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} there"

    def seen_from_peer(self) -> Self:
        """The same, as the other side says it."""
        return replace(self, ours=self.theirs, theirs=self.ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """D grants pages. `page_ids[i]` is D's page for page `skip_tokens // page_size + i` of the request."""

    tid: TransferId
    page_ids: tuple[int, ...]
    skip_tokens: int
    deadline_s: float  # seconds from receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    tids: tuple[TransferId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfer:
    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """P knows the request and will compute `num_tokens` of it (the rest it has cached)."""

    tid: TransferId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A proposer's tensor, row-major bytes; dtype as torch spells it without the prefix."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The handoff record: everything besides KV that lets D go on as if it had prefilled itself."""

    first_token: int
    first_logprob: TokenLogprob | None = None
    num_tokens: int  # tokens whose KV is in the pages
    cached_tokens: int = 0
    tensors: Mapping[str, NamedTensor] = field(default_factory=dict)
    queue_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """Every range D must see land before it may run, with one checksum per page where negotiated."""

    tid: TransferId
    ranges: tuple[tuple[int, int], ...]
    handoff: Handoff
    checksums: tuple[int, ...] | None = None  # of the pages in `ranges`, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    tid: TransferId
    code: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """P will never write to this transfer's pages again."""

    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    engine_step: int


ToPrefill = Hello | Reserve | Renew | CancelTransfer
ToDecode = Hello | Refused | Planned | Final | TransferFailed | Drained | Heartbeat
