"""Acceptance rules of published algorithms as pure functions of distributions and explicit coins.

Owns the formulas. Must never draw a number itself. p is the target's distribution, q the draft's; rows
sum to 1 up to rounding. The engine's own rule is `speculative.accept.walk`, which gives the same law as
`target_only` and besides the same tokens as plain decoding; the rules with q are for drafts that were
drawn from q, where they accept more. Shapes: `N` nodes, `K` drafts (`N = K + 1` in a chain), `V`.
"""

from collections.abc import Sequence

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


def chain_rejection(
    drafts: Sequence[int],
    p_NV: torch.Tensor,
    q_KV: torch.Tensor,
    *,
    coins: Sequence[float],
    final_coin: float,
) -> Acceptance:
    """Token-wise speculative sampling of a chain drawn from q.

    Accept draft x while coin * q(x) < p(x); then draw from max(p - q, 0), or from p after the last
    draft. A q(x) outside (0, 1] rejects. Source: Leviathan et al. 2023, algorithm 1.
    """
    num_correct = 0
    for draft, coin in zip(drafts, coins, strict=True):
        q = float(q_KV[num_correct, draft])
        if not (0.0 < q <= 1.0 and coin * q < float(p_NV[num_correct, draft])):
            break
        num_correct += 1
    residual_V = _residual(p_NV, q_KV, num_correct, scale=1.0)
    return _chain(drafts, num_correct, inverse_cdf(residual_V, final_coin))


def block_verification(
    drafts: Sequence[int],
    p_NV: torch.Tensor,
    q_KV: torch.Tensor,
    *,
    coins: Sequence[float],
    final_coin: float,
) -> Acceptance:
    """Accept the longest prefix of a chain drawn from q that holds as a block.

    Never accepts fewer in expectation than `chain_rejection`. Source: Sun et al. 2024, algorithm 2
    (arXiv 2403.10444).
    """
    ratios = _block_ratios(drafts, p_NV, q_KV)
    num_correct, scale = 0, 1.0
    for length in range(len(drafts), 0, -1):
        ratio = ratios[length - 1]
        bound = ratio
        if length < len(drafts) and 0.0 < ratio < 1.0:
            mass = float(_residual(p_NV, q_KV, length, scale=ratio).sum())
            bound = mass / (mass + 1.0 - ratio)
        if coins[length - 1] < min(ratio, bound):
            num_correct, scale = length, ratio
            break
    residual_V = _residual(p_NV, q_KV, num_correct, scale=scale)
    return _chain(drafts, num_correct, inverse_cdf(residual_V, final_coin))


def _block_ratios(drafts: Sequence[int], p_NV: torch.Tensor, q_KV: torch.Tensor) -> list[float]:
    """r_j = min(1, r_{j-1} p / q) after each draft."""
    ratios: list[float] = []
    ratio = 1.0
    for step, draft in enumerate(drafts):
        q = float(q_KV[step, draft])
        ratio = min(1.0, ratio * float(p_NV[step, draft]) / q) if 0.0 < q <= 1.0 else 0.0
        ratios.append(ratio)
    return ratios


def _residual(p_NV: torch.Tensor, q_KV: torch.Tensor, step: int, *, scale: float) -> torch.Tensor:
    """max(scale * p - q, 0) at a step with a draft, p itself after the last."""
    if step == len(q_KV):
        return p_NV[step]
    q_V = q_KV[step]
    q_V = torch.where((q_V >= 0) & (q_V <= 1), q_V, 0.0)
    return (scale * p_NV[step] - q_V).clamp(min=0.0)


def _chain(drafts: Sequence[int], num_correct: int, last_token_id: int) -> Acceptance:
    return Acceptance(tuple(range(num_correct + 1)), (*drafts[:num_correct], last_token_id))
