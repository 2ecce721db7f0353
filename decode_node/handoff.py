"""The handoff record's tensors, as the proposer wants them back."""

from collections.abc import Mapping

import torch

from engine.pool import TORCH_DTYPES
from kv_transfer.messages import NamedTensor
from speculative.proposer import Seed

_DTYPES = {**TORCH_DTYPES, "int32": torch.int32, "int64": torch.int64}


def seed_from(tensors: Mapping[str, NamedTensor], wanted: tuple[str, ...]) -> Seed | None:
    """The proposer's seed, or None when any tensor it names is absent: its first round drafts nothing.

    Raises ValueError naming the tensor when one cannot be read.
    """
    if any(name not in tensors for name in wanted):
        return None
    return Seed(tensors={name: _tensor(name, tensors[name]) for name in wanted})


def _tensor(name: str, record: NamedTensor) -> torch.Tensor:
    if record.dtype not in _DTYPES:
        raise ValueError(f"handoff tensor {name} has dtype {record.dtype!r}, known are {sorted(_DTYPES)}")
    flat = torch.frombuffer(bytearray(record.data), dtype=_DTYPES[record.dtype])
    return flat.reshape(record.shape)
