"""What an engine is asked to be, as plain values. Must never know a role, nor where a value came from."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is built from; the node configurations say what each value means.

    draft: path of the draft model, for the algorithms that have one.
    draft_options: the algorithm's own settings, and the `OPTIONS` of `speculative.policy`.
    is_prefill_only: the engine never drafts, so an algorithm that needs nothing of the prompt is not built.
    """

    model: str
    device: str
    dtype: str
    page_size: int
    num_pages: int
    kv_memory_mib: int
    max_model_len: int
    chunk_tokens: int
    max_running: int
    reserve_tokens: int
    algorithm: str
    draft: str
    draft_options: Mapping[str, object]
    threads: int
    is_prefill_only: bool
