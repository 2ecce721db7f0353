"""Acceptance rules of published algorithms as pure functions of distributions and explicit coins.

Owns the formulas. Must never draw a number itself. p is the target's distribution, q the draft's; rows
sum to 1 up to rounding. The engine's own rule is `speculative.accept.walk`, which gives the same law as
`target_only` and besides the same tokens as plain decoding; the rules with q are for drafts that were
drawn from q, where they accept more (`speculative.verify_drawn`). Shapes: `N` nodes, `K` drafts
(`N = K + 1` in a chain), `V`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from speculative.accept import Acceptance
from speculative.tree import Tree

_SMALLEST_THRESHOLD = 1e-9


def inverse_cdf(weights_V: torch.Tensor, uniform: float) -> int:
    """First index whose cumulated weight exceeds `uniform * total`; without any weight, the last index."""
    ends_V = weights_V.double().cumsum(dim=0)
    if float(ends_V[-1]) <= 0.0:
        return len(weights_V) - 1
    first = int((ends_V <= uniform * ends_V[-1]).sum())
    return min(first, int(weights_V.nonzero()[-1, 0]))


def target_only(
    tree: Tree,
    p_NV: torch.Tensor,
    *,
    coins: Sequence[float],
    final_coin: float,
    lossy_accept_threshold: float = 1.0,
    lossy_single_threshold: float = 1.0,
) -> Acceptance:
    """Accept the child in whose interval of p the node's coin falls, else draw from p without the children.

    Exact for any distinct children while both thresholds are 1; below 1 they favour drafts and are lossy.
    `coins`: one per node. Source: the tree sampler of SGLang.
    """
    threshold = max(lossy_accept_threshold, _SMALLEST_THRESHOLD)
    nodes, token_ids = [0], list[int]()
    while True:
        node, mass = nodes[-1], 0.0
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        for child in children:
            p = float(p_NV[node, tree.token_ids[child]])
            mass += p
            if p > 0 and (coins[node] < mass / threshold or p >= lossy_single_threshold):
                nodes.append(child)
                token_ids.append(tree.token_ids[child])
                break
        else:
            residual_V = p_NV[node].clone()
            residual_V[[tree.token_ids[child] for child in children]] = 0.0
            return Acceptance(tuple(nodes), (*token_ids, inverse_cdf(residual_V, final_coin)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnChain:
    """Probabilities of the drafts themselves, and one coin per draft."""

    p_K: Sequence[float]
    q_K: Sequence[float]
    coins_K: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRule:
    """How many drafts of a drawn chain stand, and what the token after them is drawn from.

    scales: after each draft, the share of p that the next token is drawn from: after j drafts that stand
        it comes from max(scale * p - q, 0), or from p where all stand. Before the first draft it is 1.
    num_correct: from the chain, its scales, and (only where `reads_masses`) for lengths 1 .. K - 1 the sum
        of max(scale * p - q, 0) after so many drafts.
    """

    scales: Callable[[DrawnChain], list[float]]
    num_correct: Callable[[DrawnChain, Sequence[float], Sequence[float]], int]
    reads_masses: bool

    def scale_after(self, scales: Sequence[float], num_correct: int) -> float:
        return scales[num_correct - 1] if num_correct else 1.0


def _whole(chain: DrawnChain) -> list[float]:
    return [1.0] * len(chain.p_K)


def _first_rejected(chain: DrawnChain, scales: Sequence[float], masses: Sequence[float]) -> int:  # noqa: ARG001 - part of the seam
    for step, (p, q, coin) in enumerate(zip(chain.p_K, chain.q_K, chain.coins_K, strict=True)):
        if not (0.0 < q <= 1.0 and coin * q < p):
            return step
    return len(chain.p_K)


def _block_ratios(chain: DrawnChain) -> list[float]:
    """r_j = min(1, r_{j-1} p / q) after each draft."""
    ratios: list[float] = []
    ratio = 1.0
    for p, q in zip(chain.p_K, chain.q_K, strict=True):
        ratio = min(1.0, ratio * p / q) if 0.0 < q <= 1.0 else 0.0
        ratios.append(ratio)
    return ratios


def _longest_block(chain: DrawnChain, ratios: Sequence[float], masses: Sequence[float]) -> int:
    for length in range(len(ratios), 0, -1):
        ratio = bound = ratios[length - 1]
        if length < len(ratios) and 0.0 < ratio < 1.0:
            mass = masses[length - 1]
            bound = mass / (mass + 1.0 - ratio)
        if chain.coins_K[length - 1] < min(ratio, bound):
            return length
    return 0


# Accept draft x while coin * q(x) < p(x); a q(x) outside (0, 1] rejects. Source: Leviathan et al. 2023,
# algorithm 1.
TOKEN_WISE = ChainRule(scales=_whole, num_correct=_first_rejected, reads_masses=False)

# Accept the longest prefix that holds as a block: never fewer in expectation than token by token. All coins
# and drafts of a round bear on what stands, so none of them may be used again in the next round. Source:
# Sun et al. 2024, algorithm 2 (arXiv 2403.10444).
BLOCK = ChainRule(scales=_block_ratios, num_correct=_longest_block, reads_masses=True)


def verify_chain(
    rule: ChainRule,
    drafts: Sequence[int],
    *,
    p_NV: torch.Tensor,
    q_KV: torch.Tensor,
    coins: Sequence[float],
    final_coin: float,
) -> Acceptance:
    """One chain, by its whole distributions."""
    rows = list(range(len(drafts)))
    chain = DrawnChain(
        p_K=p_NV[rows, list(drafts)].tolist(), q_K=q_KV[rows, list(drafts)].tolist(), coins_K=coins
    )
    scales = rule.scales(chain)
    masses = [
        float(residual(p_NV[length], q_KV[length], scales[length - 1]).sum())
        for length in range(1, len(drafts))
    ]
    num_correct = rule.num_correct(chain, scales, masses)
    left_V = p_NV[num_correct]
    if num_correct < len(drafts):
        left_V = residual(left_V, q_KV[num_correct], rule.scale_after(scales, num_correct))
    return Acceptance(tuple(range(num_correct + 1)), (*drafts[:num_correct], inverse_cdf(left_V, final_coin)))


def residual(p_XV: torch.Tensor, q_XV: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """max(scale * p - q, 0)."""
    q_XV = torch.where((q_XV >= 0) & (q_XV <= 1), q_XV, 0.0)
    return (p_XV * scale - q_XV).clamp(min=0.0)
