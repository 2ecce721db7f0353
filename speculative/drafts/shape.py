"""The shape of a tree that a draft model grows, as the options of its algorithm give it.

Owns the limits of the numbers. Must never know how a tree is grown.
"""

from dataclasses import dataclass

from speculative.growth import num_candidates

# The state keeps so many candidates whatever the shape of the tree, so that both nodes of a pair agree.
STATE_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """num_steps: depth of the tree. topk: siblings per row and beams per step; 1 makes it a chain.

    num_draft_tokens: most tokens of a proposal, the root not counted.
    """

    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int = 8

    def __post_init__(self) -> None:
        for name, value, most in (
            ("num_steps", self.num_steps, 32),
            ("topk", self.topk, STATE_WIDTH),
            ("num_draft_tokens", self.num_draft_tokens, 256),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number in [1, {most}], got {value!r}")

    @property
    def max_tokens(self) -> int:
        return min(self.num_draft_tokens, num_candidates(width=self.topk, num_steps=self.num_steps))

    @property
    def num_scratch_slots(self) -> int:
        return self.topk * (self.num_steps - 1)
