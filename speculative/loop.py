"""The round loop: propose, verify, accept, write back, observe. One loop for every algorithm and role.

A step is one forward over the next chunks of prompts and one round of every decoding request.
Owns the requests of one engine from arrival to release. Must never know of peers, transfers or text,
nor the name of an algorithm.
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from engine.batch import ForwardBatch, ForwardOutput, Span
from engine.cores import Cores, OwnCores
from engine.errors import OutOfPages
from engine.kv_cache import KvCache
from engine.models.model import Model
from engine.params import TokenLogprob
from engine.pool import PagePool
from engine.request import Request
from engine.sampling import NO_TOKEN, score
from engine.sampling_state import SamplingState
from engine.scheduler import Scheduler, SchedulerLimits
from speculative.accept import truncate
from speculative.budgets.budget import FixedBudget, Verified
from speculative.masking import Masking
from speculative.policy import DraftPolicy
from speculative.progress import LoopCounters, Progress, StepResult
from speculative.proposer import Advance, Proposal, Proposer, Seed
from speculative.tree import Tree, build
from speculative.verify import Drafted, Verdict

_EXACT = DraftPolicy()


@dataclass(slots=True, kw_only=True)
class _Work:
    """One request's part of a forward.

    tree: what is verified: root and drafts, or where a prompt ends its last token; None within a prompt, and
        at its end where the token after it is known.
    limit, ranks: the most drafts it might have, and the rank of each it has.
    verdict: once there are logits, of what has a tree.
    is_stalled: its masks are not there, so this round did not happen. error: they cannot be.
    """

    request: Request
    span: Span
    tree: Tree | None
    rows: tuple[int, int]
    is_prompt: bool
    is_prompt_end: bool = False
    q_KV: torch.Tensor | None = None
    limit: int = 0
    ranks: Sequence[int] = ()
    verdict: Verdict | None = None
    num_scored: int = 0  # the first logit rows: each scores the prompt's next token
    scores: Sequence[TokenLogprob] = ()
    is_stalled: bool = False
    error: str = ""
    progress: Progress | None = None
    advance: Advance | None = None


class EngineLoop:
    """Requests enter with `add` (prompt to be computed) or `join` (prompt in its pages, or most of it), leave
    when they finish or by `release`. A request added with `hold` keeps its pages after its first token, or
    the failure to draw it, until `release`: its KV is being sent elsewhere."""

    def __init__(
        self,
        *,
        model: Model,
        pool: PagePool,
        cache: KvCache,
        proposer: Proposer,
        limits: SchedulerLimits,
        cores: Cores | None = None,
        policy: DraftPolicy = _EXACT,
    ) -> None:
        """`cores` None: every step uses the threads that torch was given."""
        self._model = model
        self._cores = cores or OwnCores()
        self.pool = pool
        self.cache = cache
        self.proposer = proposer
        proposer.bind(model, pool)
        self.scheduler = Scheduler(cache, limits)
        max_draft_tokens = proposer.needs.max_draft_tokens
        self._budget = policy.budget or FixedBudget(max_draft_tokens)
        self._limit = 0  # of the round in hand
        self._verify = policy.verify
        self.counters = LoopCounters(accepted_at=[0] * max_draft_tokens, is_simulated=policy.is_simulated)
        self._states: dict[Hashable, SamplingState] = {}
        self._masking = Masking()
        self._hold: set[Hashable] = set()
        self._held: dict[Hashable, Request] = {}

    def mask_on(self, threads: Executor) -> None:
        """Work out what grammars allow on `threads`, so that no step waits; before the first request."""
        self._masking = Masking(threads)

    def add(self, request: Request, *, hold: bool = False) -> None:
        if hold:
            self._hold.add(request.key)
        self.scheduler.add(request)

    def join(self, request: Request, *, first_token: int, seed: Seed | None) -> None:
        """Start decoding a request whose first token is known.

        Where less than its prompt is committed, the rest is computed here first, so that its draft sees it.
        Raises ValueError for a token or a seed that cannot be; the request's pages have gone back then.
        """
        self._states[request.key] = self._new_state(request)
        self.scheduler.join(request)
        try:
            if not 0 <= first_token < self._model.config.vocab_size:
                raise ValueError(
                    f"first_token must be in [0, {self._model.config.vocab_size}), got {first_token}"
                )
            request.tokens.append(first_token)
            self._states[request.key].advance([first_token])
            if request.is_prompt_done:
                self.proposer.admit(request, seed)
        except ValueError:
            self.release(request.key)
            raise
        self.cache.publish(request)

    def release(self, key: Hashable) -> None:
        """The request leaves, wherever it is; its pages go back. Unknown keys are ignored."""
        request = self._held.pop(key, None) or self.scheduler.remove(key)
        if request is not None:
            self._retire(request)

    def hold(self, key: Hashable) -> None:
        """Compute no more of this request, but keep its pages until `release`."""
        request = self.scheduler.remove(key)
        if request is not None:
            self._held[key] = request

    def seed(self, request: Request) -> Seed:
        return self.proposer.seed(request)

    @property
    def is_masking(self) -> bool:
        """Whether a request waits, or may wait, for what its grammar allows: steps alone will tell."""
        return self._masking.num_jobs > 0

    def requests(self) -> list[Request]:
        return [*self.scheduler.requests(), *self._held.values()]

    def step(self) -> StepResult:
        admitted = self.scheduler.admit()
        for request in admitted:
            state = self._states[request.key] = self._new_state(request)
            if state.is_constrained:
                self._masking.begin(request.key, state)
        if self.scheduler.num_running == 0:
            return StepResult()
        with self._cores.step():
            work, preempted = self._plan()
            if work:
                self._run(work)
        progress = tuple(self._settle(item) for item in work)
        return StepResult(progress=progress, admitted=tuple(admitted), preempted=tuple(preempted))

    # planning

    def _plan(self) -> tuple[list[_Work], list[Request]]:
        preempted: list[Request] = []
        limits: dict[Request, int] = {}
        decoding = [one for one in self.scheduler.decoding() if self._masking.may_run(one.key)]
        if decoding:
            self._limit = self.counters.draft_limit = self._budget.start(len(decoding))
        for request in decoding:
            if request not in preempted:
                limits[request] = self._fit(request, preempted)
        limits = {request: limit for request, limit in limits.items() if request not in preempted}
        proposals = self.proposer.propose(list(limits), list(limits.values())) if limits else []
        work = [
            self._round(request, limit, proposal)
            for (request, limit), proposal in zip(limits.items(), proposals, strict=True)
        ]
        work += [
            self._chunk(request, count)
            for request, count in self.scheduler.chunks()
            if self._masking.may_run(request.key)
        ]
        start = 0
        for item in work:
            item.rows = (start, start + len(item.span.token_ids))
            start = item.rows[1]
        return work, preempted

    def _draft_limit(self, request: Request) -> int:
        """A round emits at least one token, so one of those still wanted is never worth drafting."""
        if not self._masking.may_draft(request.key):
            return 0
        remaining = request.sampling.max_tokens - request.num_outputs
        return min(self._limit, remaining - 1)

    def _fit(self, request: Request, preempted: list[Request]) -> int:
        """Find slots for root and drafts; returns how many tokens may be drafted.

        Short of pages, drop the drafts, then the youngest requests, at last this one.
        """
        limit = self._draft_limit(request)
        try:
            num_slots = max(1 + limit, self.proposer.needs.num_scratch_slots if limit else 1)
            self.cache.grow(request, request.num_committed + num_slots)
            return limit
        except OutOfPages:
            pass
        while request not in preempted:
            try:
                self.cache.grow(request, request.num_committed + 1)
                break
            except OutOfPages:
                victim = self.scheduler.youngest()
                self._preempt(victim)
                preempted.append(victim)
        return 0

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        self.release(request.key)

    def _round(self, request: Request, limit: int, proposal: Proposal) -> _Work:
        tree = build(request.tokens[-1], proposal)
        state = self._states[request.key]
        if state.is_constrained:
            self._masking.begin(request.key, state, tree)
        span = Span(
            token_ids=tree.token_ids,
            num_committed=request.num_committed,
            pages=request.pages,
            positions=tree.positions(request.num_committed),
            logit_rows=range(tree.num_nodes),
            parents=tree.span_parents,
        )
        return _Work(
            request=request,
            span=span,
            tree=tree,
            rows=(0, 0),
            is_prompt=False,
            q_KV=proposal.q_KV,
            limit=limit,
            ranks=proposal.ranks or range(1, tree.num_nodes),
        )

    def _chunk(self, request: Request, count: int) -> _Work:
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
        return _Work(
            request=request,
            span=span,
            tree=build(request.prompt_ids[-1], Proposal()) if is_drawn else None,
            rows=(0, 0),
            is_prompt=True,
            is_prompt_end=is_end,
            num_scored=num_scored,
        )

    # running

    def _run(self, work: list[_Work]) -> None:
        self.counters.steps += 1
        batch = ForwardBatch(
            spans=[item.span for item in work], hidden_layers=self.proposer.needs.hidden_layers
        )
        output = self._model.forward(batch, self.pool)
        self._judge(work, output)
        work[:] = [item for item in work if not item.is_stalled]
        moves: list[tuple[int, int]] = []
        for item in work:
            if item.is_prompt:
                self._advance_prompt(item)
            else:
                moves += self._advance_round(item)
        if moves:
            self._write_back(moves)
        advances = [
            item.advance for item in work if item.advance and item.progress and not item.progress.error
        ]
        self.proposer.observe(advances, output)
        self._finish_rounds(work)

    def _finish_rounds(self, work: list[_Work]) -> None:
        rounds = [item for item in work if not item.is_prompt]
        if rounds:
            verified = [_verified(item) for item in rounds]
            self._budget.finish(verified, is_alone=len(rounds) == len(work))
            self.counters.budget = self._budget.state

    def _judge(self, work: list[_Work], output: ForwardOutput) -> None:
        judged = [(item, item.tree) for item in work if item.tree is not None]
        self._masking.wait(item.request.key for item, _ in judged if self._is_constrained(item))
        rounds = [self._drafted(item, tree) for item, tree in judged]
        verdicts = self._verify(_score(work, output.logits_RV), rounds)
        for (item, _), verdict in zip(judged, verdicts, strict=True):
            item.verdict = verdict

    def _drafted(self, item: _Work, tree: Tree) -> Drafted:
        """A round whose masks are not there, or cannot be, is judged without: that verdict does not count."""
        key = item.request.key
        free = Drafted(state=self._states[key], tree=tree, q_KV=item.q_KV)
        if not free.state.is_constrained:
            return free
        if not self._masking.may_run(key):
            item.is_stalled = True
            self.counters.stalled_rounds += 1
            return free
        try:
            allowed = self._masking.take(key)[: tree.num_nodes]
        except ValueError as error:
            item.error = str(error)
            return free
        self.counters.constrained_rows += tree.num_nodes
        return replace(free, allowed=allowed)

    def _is_constrained(self, item: _Work) -> bool:
        return self._states[item.request.key].is_constrained

    def _advance_prompt(self, item: _Work) -> None:
        request = item.request
        count = len(item.span.token_ids)
        first_scored = request.num_committed + 1
        request.num_committed += count
        self.counters.prompt_tokens += count
        item.progress = Progress(request=request) if item.verdict is None else self._emit(item, item.verdict)
        if item.scores:
            item.progress = replace(
                item.progress, first_scored=first_scored, prompt_logprobs=tuple(item.scores)
            )
        item.advance = Advance(
            request=request,
            rows=item.rows,
            accepted_nodes=range(count),
            token_ids=request.tokens[request.num_committed : request.num_committed + 1],
            is_prompt=True,
        )

    def _advance_round(self, item: _Work) -> list[tuple[int, int]]:
        """Accept, commit, and return the KV rows to move, as (source slot, target slot) of the pool."""
        request, verdict = item.request, item.verdict
        assert verdict is not None
        accepted = verdict.accepted
        base = request.num_committed
        moves = [
            (self._slot(request, base + node), self._slot(request, base + depth))
            for depth, node in enumerate(accepted.nodes)
            if node != depth
        ]
        self._count_round(len(item.span.token_ids) - 1, accepted.num_correct_drafts)
        item.progress = self._emit(item, verdict)
        request.num_committed = len(request.tokens) - 1
        item.advance = Advance(
            request=request,
            rows=item.rows,
            accepted_nodes=accepted.nodes[: request.num_committed - base],
            token_ids=item.progress.tokens,
            is_prompt=False,
        )
        return moves

    def _emit(self, item: _Work, verdict: Verdict) -> Progress:
        """Append what the stop rules leave of the verdict's tokens."""
        request, tokens = item.request, verdict.accepted.token_ids
        ending = truncate(tokens, params=request.sampling, num_outputs=request.num_outputs)
        kept = ending.token_ids
        if item.error or NO_TOKEN in kept:
            return Progress(request=request, error=item.error or verdict.error)
        request.tokens += kept
        request.num_steps += 1
        self.counters.output_tokens += len(kept)
        self._states[request.key].advance(kept)
        return Progress(
            request=request,
            tokens=kept,
            logprobs=_logprobs(verdict, len(kept)) if request.sampling.logprobs is not None else None,
            num_drafted=0 if item.is_prompt else len(item.span.token_ids) - 1,
            num_accepted=min(len(tokens) - 1, len(kept)),
            finish_reason=ending.finish_reason,
            stop_token_id=ending.stop_token_id,
        )

    def _count_round(self, num_drafted: int, num_correct_drafts: int) -> None:
        self.counters.rounds += 1
        self.counters.drafted_rounds += num_drafted > 0
        self.counters.drafted += num_drafted
        self.counters.accepted += num_correct_drafts
        for position in range(num_correct_drafts):
            self.counters.accepted_at[position] += 1

    def _write_back(self, moves: list[tuple[int, int]]) -> None:
        """Compact accepted rows to the front of the round's window (spec: gather, then scatter)."""
        source, target = zip(*moves, strict=True)
        self.pool.move_rows(torch.tensor(source), torch.tensor(target))

    def _slot(self, request: Request, slot: int) -> int:
        size = self.cache.page_size
        return request.pages[slot // size] * size + slot % size

    # settling

    def _settle(self, item: _Work) -> Progress:
        """Publish full pages, move the request to where it belongs next, and say what happened."""
        request, progress = item.request, item.progress
        assert progress is not None
        if not progress.error:
            self.cache.publish(request)
        if item.is_prompt_end and request.key in self._hold:
            self.hold(request.key)
        elif progress.error or progress.finish_reason is not None:
            self.release(request.key)
        else:
            if item.is_prompt_end:
                self.proposer.admit(request, None)
            if self._masking.is_slow(request.key):
                self._masking.begin(request.key, self._states[request.key])
        return progress

    def _retire(self, request: Request) -> None:
        self._hold.discard(request.key)
        self._masking.forget(request.key)
        self._states.pop(request.key, None)
        self.proposer.forget(request)
        self.cache.release(request)

    def _new_state(self, request: Request) -> SamplingState:
        return SamplingState(
            request.sampling,
            tokens=request.prompt_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            vocab_size=self._model.config.vocab_size,
            matcher=request.matcher,
        )


def _num_scored(request: Request, count: int) -> int:
    """How many of the next `count` prompt rows score a token of the user's prompt."""
    if request.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(count, request.num_prompt_tokens - request.num_committed - 1))


def _score(work: Sequence[_Work], logits_RV: torch.Tensor) -> torch.Tensor:
    """Let every chunk keep the scores of its prompt tokens; returns the logits to draw from."""
    if not any(item.num_scored for item in work):
        return logits_RV
    drawn: list[int] = []
    start = 0
    for item in work:
        stop = start + len(item.span.logit_rows)
        middle = start + item.num_scored
        if middle > start:
            sampling, prompt, first = (
                item.request.sampling,
                item.request.prompt_ids,
                item.span.num_committed + 1,
            )
            item.scores = score(
                logits_RV[start:middle],
                prompt[first : first + item.num_scored],
                sampling.prompt_logprobs or 0,
            )
        drawn += range(middle, stop)
        start = stop
    return logits_RV[drawn]


def _logprobs(verdict: Verdict, count: int) -> tuple[TokenLogprob, ...]:
    return tuple(entry for entry in verdict.logprobs[:count] if entry is not None)


def _verified(item: _Work) -> Verified:
    assert item.verdict is not None
    return Verified(item.limit, [item.ranks[node - 1] for node in item.verdict.accepted.nodes[1:]])
