"""The round loop: propose, verify, accept, write back, observe. One loop for every algorithm and role.

A step is one forward over the next chunks of prompts and one round of every decoding request.
Owns the requests of one engine from arrival to release. Must never know of peers, transfers or text,
nor the name of an algorithm.
"""

from collections.abc import Hashable
from concurrent.futures import Executor
from dataclasses import replace

import torch

from engine.batch import ForwardBatch, ForwardOutput
from engine.cores import Cores, OwnCores
from engine.errors import OutOfPages
from engine.kv_cache import KvCache
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from engine.sampling_state import SamplingState
from engine.scheduler import Scheduler, SchedulerLimits
from speculative.budgets.budget import FixedBudget
from speculative.commit import commit_chunk, commit_round
from speculative.masking import Masking
from speculative.parts import Part, part_of_prompt, part_of_round, score_prompts
from speculative.policy import DraftPolicy
from speculative.progress import LoopCounters, Progress, StepResult
from speculative.proposer import Proposal, Proposer, Seed
from speculative.tree import Tree, build
from speculative.verify import Drafted

_EXACT = DraftPolicy()


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
            parts, preempted = self._plan()
            if parts:
                self._run(parts)
        progress = tuple(self._settle(part) for part in parts)
        return StepResult(progress=progress, admitted=tuple(admitted), preempted=tuple(preempted))

    # planning

    def _plan(self) -> tuple[list[Part], list[Request]]:
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
        parts = [
            self._round(request, limit, proposal)
            for (request, limit), proposal in zip(limits.items(), proposals, strict=True)
        ]
        parts += [
            part_of_prompt(request, count)
            for request, count in self.scheduler.chunks()
            if self._masking.may_run(request.key)
        ]
        start = 0
        for part in parts:
            part.rows = (start, start + len(part.span.token_ids))
            start = part.rows[1]
        return parts, preempted

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

    def _round(self, request: Request, limit: int, proposal: Proposal) -> Part:
        tree = build(request.tokens[-1], proposal)
        state = self._states[request.key]
        if state.is_constrained:
            self._masking.begin(request.key, state, tree)
        return part_of_round(request, tree, limit=limit, proposal=proposal)

    # running

    def _run(self, parts: list[Part]) -> None:
        self.counters.steps += 1
        batch = ForwardBatch(
            spans=[part.span for part in parts], hidden_layers=self.proposer.needs.hidden_layers
        )
        output = self._model.forward(batch, self.pool)
        self._judge(parts, output)
        parts[:] = [part for part in parts if not part.is_stalled]
        moves: list[tuple[int, int]] = []
        for part in parts:
            state = self._states[part.request.key]
            if part.is_prompt:
                commit_chunk(part, state, self.counters)
            else:
                moves += commit_round(part, state, self.counters, page_size=self.cache.page_size)
        if moves:
            self._write_back(moves)
        advances = [
            part.advance for part in parts if part.advance and part.progress and not part.progress.error
        ]
        self.proposer.observe(advances, output)
        self._finish_rounds(parts)

    def _finish_rounds(self, parts: list[Part]) -> None:
        rounds = [part for part in parts if not part.is_prompt]
        if rounds:
            verified = [part.verified() for part in rounds]
            self._budget.finish(verified, is_alone=len(rounds) == len(parts))
            self.counters.budget = self._budget.state

    def _judge(self, parts: list[Part], output: ForwardOutput) -> None:
        judged = [(part, part.tree) for part in parts if part.tree is not None]
        self._masking.wait(part.request.key for part, _ in judged if self._is_constrained(part))
        rounds = [self._drafted(part, tree) for part, tree in judged]
        verdicts = self._verify(score_prompts(parts, output.logits_RV), rounds)
        for (part, _), verdict in zip(judged, verdicts, strict=True):
            part.verdict = verdict

    def _drafted(self, part: Part, tree: Tree) -> Drafted:
        """A round whose masks are not there, or cannot be, is judged without: that verdict does not count."""
        key = part.request.key
        free = Drafted(state=self._states[key], tree=tree, q_KV=part.q_KV)
        if not free.state.is_constrained:
            return free
        if not self._masking.may_run(key):
            part.is_stalled = True
            self.counters.stalled_rounds += 1
            return free
        try:
            allowed = self._masking.take(key)[: tree.num_nodes]
        except ValueError as error:
            part.error = str(error)
            return free
        self.counters.constrained_rows += tree.num_nodes
        return replace(free, allowed=allowed)

    def _is_constrained(self, part: Part) -> bool:
        return self._states[part.request.key].is_constrained

    def _write_back(self, moves: list[tuple[int, int]]) -> None:
        """Compact accepted rows to the front of the round's window (spec: gather, then scatter)."""
        source, target = zip(*moves, strict=True)
        self.pool.move_rows(torch.tensor(source), torch.tensor(target))

    # settling

    def _settle(self, part: Part) -> Progress:
        """Publish full pages, move the request to where it belongs next, and say what happened."""
        request, progress = part.request, part.progress
        assert progress is not None
        if not progress.error:
            self.cache.publish(request)
        if part.is_prompt_end and request.key in self._hold:
            self.hold(request.key)
        elif progress.error or progress.finish_reason is not None:
            self.release(request.key)
        else:
            if part.is_prompt_end:
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
