"""The proposer's seed, as named tensors of the handoff record."""

from collections.abc import Mapping

import torch

from kv_transfer.messages import NamedTensor
from speculative.proposer import Seed


def tensors_of(seed: Seed) -> Mapping[str, NamedTensor]:
    """Row-major bytes of every tensor, copied to the host."""
    records = {}
    for name, tensor in seed.tensors.items():
        host = tensor.detach().cpu().contiguous()
        records[name] = NamedTensor(
            dtype=str(host.dtype).removeprefix("torch."),
            shape=tuple(host.shape),
            data=host.flatten().view(torch.uint8).numpy().tobytes(),
        )
    return records
