"""The handoff record's tensors, as the proposer wants them back."""

import torch

from engine.pool import TORCH_DTYPES
from kv_transfer.geometry import check_handoff
from kv_transfer.messages import Handoff, NamedTensor
from speculative.proposer import Seed

_DTYPES = {**TORCH_DTYPES, "int32": torch.int32, "int64": torch.int64}


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
