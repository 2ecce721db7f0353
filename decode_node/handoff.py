"""The handoff record's tensors, as the proposer wants them back, and what becomes of a prompt without them.

Owns the reading of the record. Must never know pages.
"""

import torch

from engine.pool import TORCH_DTYPES
from kv_transfer.geometry import Agreement, check_handoff
from kv_transfer.messages import Handoff, NamedTensor
from speculative.proposer import Seed

_DTYPES = {**TORCH_DTYPES, "int32": torch.int32, "int64": torch.int64}

SEEDLESS_TOKENS = 64
"""So many last tokens of a prompt that came without our draft's KV are computed again for its sake."""


def draft_start_of(num_prompt_tokens: int, *, page_size: int) -> int:
    """From which slot on our draft knows such a prompt."""
    return max(0, num_prompt_tokens - SEEDLESS_TOKENS) // page_size * page_size


def seed_of(handoff: Handoff, terms: Agreement, wanted: tuple[str, ...]) -> Seed | None:
    """The seed for our draft, or None without one; another draft's tensors are let be.

    Raises ValueError naming the tensor that cannot be.
    """
    if terms.draft_differs is None:
        return seed_from(handoff, wanted)
    return None if terms.is_seedless else Seed()


def seed_from(handoff: Handoff, wanted: tuple[str, ...]) -> Seed | None:
    """The proposer's seed, or None when the record has no tensors: its first round drafts nothing.

    Raises ValueError naming the tensor when one is missing, unknown or cannot be read.
    """
    refused = check_handoff(handoff, dict.fromkeys(wanted))
    if refused is not None:
        raise ValueError(str(refused))
    if wanted and not handoff.tensors:
        return None
    return Seed(tensors={name: _tensor(name, handoff.tensors[name]) for name in wanted})


def _tensor(name: str, record: NamedTensor) -> torch.Tensor:
    if record.dtype not in _DTYPES:
        raise ValueError(f"handoff tensor {name} has dtype {record.dtype!r}, known are {sorted(_DTYPES)}")
    flat = torch.frombuffer(bytearray(record.data), dtype=_DTYPES[record.dtype])
    return flat.reshape(record.shape)
