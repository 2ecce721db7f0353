"""Settings of one decode node: those of every node (`wire.node_config`), and what differs here.

Owns the names, defaults and meanings of its own.
"""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from wire.node_config import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LettingIn:
    """Every instance is valid. Each field is a flag of its own, as all others."""

    reserve_tokens: int = 512
    """Tokens of growth counted on for every running request before another one is let in."""

    allow_seedless: bool = False
    """Serve prompts of prefill nodes that run another draft, or none; fewer of our drafts stand then."""

    def __post_init__(self) -> None:
        if self.reserve_tokens < 0:
            raise ValueError(f"reserve_tokens must be at least 0, got {self.reserve_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(NodeConfig):
    """Every instance is valid: bad values raise ValueError naming the field."""

    port: int = 7201
    """Port of the gRPC server; 0 takes a free one."""

    max_running: int = 32
    """Most requests in the running batch."""

    letting_in: Annotated[LettingIn, Parameter(name="*")] = LettingIn()
    """Which requests join the batch, and when."""

    algorithm: str = "ngram"
    """Drafting algorithm: ngram, eagle3, eagle, mtp, dflash, standalone, none for plain decoding, or a plugin
    as package.module:factory. Must be equal on both nodes of a pair."""

    draft_options: str = ""
    """Settings of the algorithm, such as "num_steps=4,topk=4", and acceptance, budget, budget_slots,
    simulate_acceptance; any other name is refused."""
