"""What the outside is told about a built engine. Torch-free, so that the network side may read it."""

from dataclasses import dataclass

from engine.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """`address` and `buffer` are the KV pool's memory, which lives as long as the engine.

    prefill_identity, draft, draft_weights: what of the drafting a prefill node must have too; empty: nothing.
    """

    layout: KvLayout
    address: int
    buffer: memoryview
    num_pages: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    dtype: str
    weights_fingerprint: str
    prefill_identity: str
    draft: str
    draft_weights: str
