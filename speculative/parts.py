"""One request's part of a forward: which rows it asks for, and what came of them.

Owns how a chunk of a prompt and a round of drafts become a span, and whose logits are whose. Must never
know how requests are chosen, where their pages come from or what is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import Span
from engine.params import TokenLogprob
from engine.request import Request
from engine.sampling import score
from speculative.budgets.budget import Verified
from speculative.progress import Progress
from speculative.proposer import Advance, Proposal
from speculative.tree import Tree, build
from speculative.verify import Verdict


@dataclass(slots=True, kw_only=True)
class Part:
    """The loop plans it, then fills in what happened.

    tree: what is verified: root and drafts, or where a prompt ends its last token; None within a prompt, and
        at its end where the token after it is known.
    rows: where it lies among the tokens of the forward, known once all parts are.
    limit, ranks: the most drafts it might have, and the rank of each it has.
    num_scored: the first logit rows; each scores the prompt's next token.
    verdict: once there are logits, of what has a tree.
    is_stalled: its masks are not there, so this round did not happen. error: they cannot be.
    """

    request: Request
    span: Span
    tree: Tree | None
    rows: tuple[int, int] = (0, 0)
    is_prompt: bool
    is_prompt_end: bool = False
    q_KV: torch.Tensor | None = None
    limit: int = 0
    ranks: Sequence[int] = ()
    verdict: Verdict | None = None
    num_scored: int = 0
    scores: Sequence[TokenLogprob] = ()
    is_stalled: bool = False
    error: str = ""
    progress: Progress | None = None
    advance: Advance | None = None

    def verified(self) -> Verified:
        """What a judged round tells the budget."""
        assert self.verdict is not None
        return Verified(self.limit, [self.ranks[node - 1] for node in self.verdict.accepted.nodes[1:]])


def part_of_round(request: Request, tree: Tree, *, limit: int, proposal: Proposal) -> Part:
    span = Span(
        token_ids=tree.token_ids,
        num_committed=request.num_committed,
        pages=request.pages,
        positions=tree.positions(request.num_committed),
        logit_rows=range(tree.num_nodes),
        parents=tree.span_parents,
    )
    return Part(
        request=request,
        span=span,
        tree=tree,
        is_prompt=False,
        q_KV=proposal.q_KV,
        limit=limit,
        ranks=proposal.ranks or range(1, tree.num_nodes),
    )


def part_of_prompt(request: Request, count: int) -> Part:
    """The next `count` tokens of a prompt."""
    start = request.num_committed
    is_end = start + count == len(request.prompt_ids)
    is_drawn = is_end and not request.has_first_token
    num_scored = 0 if request.has_first_token else _num_scored(request, count)
    span = Span(
        token_ids=request.prompt_ids[start : start + count],
        num_committed=start,
        pages=request.pages,
        positions=range(start, start + count),
        logit_rows=(*range(num_scored), *([count - 1] if is_drawn else [])),
    )
    return Part(
        request=request,
        span=span,
        tree=build(request.prompt_ids[-1], Proposal()) if is_drawn else None,
        is_prompt=True,
        is_prompt_end=is_end,
        num_scored=num_scored,
    )


def score_prompts(parts: Sequence[Part], logits_RV: torch.Tensor) -> torch.Tensor:
    """Let every chunk keep the scores of its prompt tokens; returns the logits to draw from."""
    if not any(part.num_scored for part in parts):
        return logits_RV
    drawn: list[int] = []
    start = 0
    for part in parts:
        stop = start + len(part.span.logit_rows)
        middle = start + part.num_scored
        if middle > start:
            part.scores = _scores(part, logits_RV[start:middle])
        drawn += range(middle, stop)
        start = stop
    return logits_RV[drawn]


def _num_scored(request: Request, count: int) -> int:
    """How many of the next `count` prompt rows score a token of the user's prompt."""
    if request.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(count, request.num_prompt_tokens - request.num_committed - 1))


def _scores(part: Part, logits_RV: torch.Tensor) -> Sequence[TokenLogprob]:
    request, first = part.request, part.span.num_committed + 1
    scored = request.prompt_ids[first : first + part.num_scored]
    return score(logits_RV, scored, request.sampling.prompt_logprobs or 0)
