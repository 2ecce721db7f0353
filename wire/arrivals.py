"""What becomes of a Submit before its node takes it on: refused, taken on, or waiting for its grammar.

Owns the wait for grammars, apart from everything that can run, and its limits. Must never know what a
grammar is, nor a role.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from engine.grammar import Grammars, Matcher
from engine.request import Request
from kv_transfer import errors
from kv_transfer.ids import TransferId
from wire.host_events import Link
from wire.intake import OVERLOADED, Intake, refuse, request_of
from wire.link_table import LinkTable
from wire.work import BAD_GRAMMAR, Rejected, Submit

logger = logging.getLogger(__name__)

COMPILE_LIMIT_S = 10.0
"""A compilation that takes longer is given up; its thread is free again only when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A Submit that may be taken on, as a request. `received`: when it came, on `link`."""

    link: Link
    submit: Submit
    received: float
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    link: Link
    submit: Submit
    received: float
    matcher: "Future[Matcher]"


class Arrivals:
    """Invariant: a Submit is refused once, or comes out once: of `submit` or, with a grammar, of `take`."""

    def __init__(self, *, intake: Intake, links: LinkTable, grammars: Grammars | None) -> None:
        """`grammars` None: this node cannot constrain its output."""
        self._intake = intake
        self._links = links
        self._grammars = grammars
        self._held: dict[TransferId, _Held] = {}
        self.num_rejected = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def submit(
        self, link: Link, submit: Submit, *, num_waiting: int, is_live: bool, is_draining: bool, now: float
    ) -> Arrival | None:
        """What can be taken on at once; None where it was refused or waits. `num_waiting`: besides these."""
        refusal = self._intake.check(
            submit,
            num_waiting=num_waiting + len(self._held),
            is_live=is_live or submit.tid in self._held,
            is_draining=is_draining,
        )
        if refusal is None and submit.grammar:
            refusal = self._hold(link, submit, now)
        elif refusal is None:
            return Arrival(link=link, submit=submit, received=now, request=request_of(submit))
        if refusal is not None:
            self._reject(link, refusal)
        return None

    def take(self, *, now: float) -> Iterator[Arrival]:
        """Those whose grammar is ready by now."""
        for held in list(self._held.values()):
            outcome = self._outcome(held, now)
            if outcome is None:
                continue
            del self._held[held.submit.tid]
            if isinstance(outcome, Rejected):
                held.matcher.cancel()
                self._links.forget(outcome.tid)
                self._reject(held.link, outcome)
            else:
                request = request_of(held.submit, outcome)
                yield Arrival(link=held.link, submit=held.submit, received=held.received, request=request)

    def refuse(self, arrival: Arrival, code: str, reason: str, *, retryable: bool = False) -> None:
        """The node does not take it on after all."""
        self._links.forget(arrival.submit.tid)
        self._reject(arrival.link, refuse(arrival.submit, code, reason, retryable=retryable))

    def drop(self, tid: TransferId) -> bool:
        """The router wants it no more; False where it does not wait here."""
        held = self._held.pop(tid, None)
        if held is not None:
            held.matcher.cancel()
        return held is not None

    def _hold(self, link: Link, submit: Submit, now: float) -> Rejected | None:
        if self._grammars is None:
            return refuse(
                submit, BAD_GRAMMAR, "grammar must be empty: this node does not constrain its output"
            )
        matcher = self._grammars.prepare(
            submit.grammar,
            emitted=submit.prompt_ids[submit.num_prompt_tokens :],
            stop_token_ids=submit.sampling.stop_token_ids,
        )
        self._held[submit.tid] = _Held(link=link, submit=submit, received=now, matcher=matcher)
        self._links.own(link, submit.tid)
        return None

    def _outcome(self, held: _Held, now: float) -> Matcher | Rejected | None:
        submit, waited = held.submit, now - held.received
        if waited >= submit.deadline_s:
            return refuse(submit, errors.DEADLINE, "out of time while its grammar was compiled")
        if held.matcher.done():
            error = held.matcher.exception()
            if error is None:
                return held.matcher.result()
            if not isinstance(error, ValueError):
                logger.error("a grammar could not be compiled", exc_info=error)
            return refuse(submit, BAD_GRAMMAR, str(error))
        if waited < COMPILE_LIMIT_S:
            return None
        if held.matcher.running():
            reason = f"grammar: it took longer than {COMPILE_LIMIT_S:g} s to compile"
            return refuse(submit, BAD_GRAMMAR, reason)
        reason = f"{len(self._held)} grammars wait here to be compiled"
        return refuse(submit, OVERLOADED, reason, retryable=True)

    def _reject(self, link: Link, refusal: Rejected) -> None:
        self.num_rejected += 1
        self._links.reject(link, refusal)
