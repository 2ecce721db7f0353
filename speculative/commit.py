"""What a judged part of a step makes of its request: new tokens, committed slots, and KV rows to move.

Owns how a request advances. Must never know how its tokens were drafted or judged, nor what comes next.
"""

from dataclasses import replace

from engine.params import TokenLogprob
from engine.request import Request
from engine.sampling import NO_TOKEN
from engine.sampling_state import SamplingState
from speculative.accept import truncate
from speculative.parts import Part
from speculative.progress import LoopCounters, Progress
from speculative.proposer import Advance
from speculative.verify import Verdict


def commit_chunk(part: Part, state: SamplingState, counters: LoopCounters) -> None:
    """The chunk's slots are committed; at the end of a prompt its first token is known."""
    request = part.request
    count = len(part.span.token_ids)
    first_scored = request.num_committed + 1
    request.num_committed += count
    counters.prompt_tokens += count
    if part.verdict is None:
        part.progress = Progress(request=request)
    else:
        part.progress = _emit(part, part.verdict, state, counters)
    if part.scores:
        part.progress = replace(part.progress, first_scored=first_scored, prompt_logprobs=tuple(part.scores))
    part.advance = Advance(
        request=request,
        rows=part.rows,
        accepted_nodes=range(count),
        token_ids=request.tokens[request.num_committed : request.num_committed + 1],
        is_prompt=True,
    )


def commit_round(
    part: Part, state: SamplingState, counters: LoopCounters, *, page_size: int
) -> list[tuple[int, int]]:
    """Accept, commit, and return the KV rows to move, as (source slot, target slot) of the pool."""
    request, verdict = part.request, part.verdict
    assert verdict is not None
    accepted = verdict.accepted
    base = request.num_committed
    moves = [
        (_pool_slot(request, base + node, page_size), _pool_slot(request, base + depth, page_size))
        for depth, node in enumerate(accepted.nodes)
        if node != depth
    ]
    part.progress = _emit(part, verdict, state, counters)
    counters.count_round(num_drafted=len(part.span.token_ids) - 1, num_accepted=part.progress.num_accepted)
    request.num_committed = len(request.tokens) - 1
    part.advance = Advance(
        request=request,
        rows=part.rows,
        accepted_nodes=accepted.nodes[: request.num_committed - base],
        token_ids=part.progress.tokens,
        is_prompt=False,
    )
    return moves


def _emit(part: Part, verdict: Verdict, state: SamplingState, counters: LoopCounters) -> Progress:
    """Append what the stop rules leave of the verdict's tokens."""
    request, tokens = part.request, verdict.accepted.token_ids
    ending = truncate(tokens, params=request.sampling, num_outputs=request.num_outputs)
    kept = ending.token_ids
    if part.error or NO_TOKEN in kept:
        return Progress(request=request, error=part.error or verdict.error)
    request.tokens += kept
    request.num_steps += 1
    counters.output_tokens += len(kept)
    state.advance(kept)
    return Progress(
        request=request,
        tokens=kept,
        logprobs=_logprobs(verdict, len(kept)) if request.sampling.logprobs is not None else None,
        num_drafted=0 if part.is_prompt else len(part.span.token_ids) - 1,
        num_accepted=min(len(tokens) - 1, len(kept)),
        finish_reason=ending.finish_reason,
        stop_token_id=ending.stop_token_id,
    )


def _logprobs(verdict: Verdict, count: int) -> tuple[TokenLogprob, ...]:
    return tuple(entry for entry in verdict.logprobs[:count] if entry is not None)


def _pool_slot(request: Request, slot: int, page_size: int) -> int:
    return request.pages[slot // page_size] * page_size + slot % page_size
