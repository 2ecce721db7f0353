"""What the router and a node say to each other on a `Work` stream (PROTOCOL.md, "Router <-> node").

Plain values: `wire.convert` turns them into protobuf, the simulation passes them as they are. Those that come
with every token are structs, which cost a tenth of a frozen dataclass to make.
"""

from dataclasses import dataclass

import msgspec

from engine.grammar_spec import GrammarSpec, json_schema_grammar
from engine.params import SamplingParams, TokenLogprob
from kv_transfer.ids import Incarnation, TransferId, new_incarnation

__all__ = [
    "BAD_GRAMMAR",
    "Accepted",
    "Cancel",
    "Event",
    "Failed",
    "Finished",
    "Frame",
    "GrammarSpec",
    "Incarnation",
    "NodeRef",
    "Preempted",
    "PromptInfo",
    "PromptLogprobs",
    "Rejected",
    "SamplingParams",
    "Submit",
    "TokenLogprob",
    "Tokens",
    "TransferId",
    "Unreadable",
    "WorkHello",
    "json_schema_grammar",
    "new_incarnation",
]


BAD_GRAMMAR = "bad_grammar"
"""The code of a Submit rejected for its grammar alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRef:
    """The other node of a pair, as a node needs to know it."""

    address: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkHello:
    """First message both ways on a Work stream. `has_kv_events`: the node answers KvSubscribe."""

    incarnation: Incarnation
    role: str  # "router", "prefill", "decode"
    version: int = 2
    has_kv_events: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Work for one node. To P, `peer` is the decode node; to D, the prefill node, or None: prefill here.

    `prompt_ids` = the user's prompt, then the tokens already delivered by earlier attempts;
    `num_prompt_tokens` of them are the user's. Output index 0 is the token after the user's prompt.
    `deadline_s` counts from receipt. `grammar`: the text of a `GrammarSpec`, "" for none.
    """

    tid: TransferId
    prompt_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    peer: NodeRef | None
    deadline_s: float
    priority: int = 0
    cache_salt: str = ""
    grammar: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Stands for a Submit that came but cannot be read, though its tid can: that request's fault alone."""

    tid: TransferId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    tid: TransferId
    queued_behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The node took nothing on. `code` is one of errors.CODES."""

    tid: TransferId
    code: str
    retryable: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    tid: TransferId
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Of prompt tokens [first_index, first_index + len(logprobs)); the first token of a prompt has none.

    Come in order, chunk by chunk, before the first Tokens.
    """

    tid: TransferId
    first_index: int
    logprobs: tuple[TokenLogprob, ...]


class Tokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The tokens one step added to one request: output indices [first_index, first_index + len(ids)).

    The first `accepted` of them were drafted, out of `drafted` proposed; the rest the target drew.
    """

    tid: TransferId
    first_index: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`reason` is "stop" (with the stop token id), "length" or "handed_over" (P, when D goes on)."""

    tid: TransferId
    reason: str
    stop_token_id: int | None = None
    kv_bytes: int = 0  # received (D) or sent (P)
    transport: str = ""
    queue_s: float = 0.0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    num_steps: int = 0
    seedless: str = ""  # how P's draft differs from D's, where D went on without its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """D ran out of pages: dispatch again from `next_index`."""

    tid: TransferId
    next_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    tid: TransferId
    code: str
    retryable: bool
    reason: str


Event = Accepted | Rejected | PromptInfo | PromptLogprobs | Tokens | Finished | Preempted | Failed


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """All events of one engine step for one router, in order."""

    step: int
    events: tuple[Event, ...]
