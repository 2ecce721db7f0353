"""What every node asks of a Submit before it takes it on.

Owns the order of the checks and the codes of the refusals. Must never know a role.
"""

import math
from dataclasses import replace

from engine.admission import EngineLimits
from engine.grammar import Matcher
from engine.request import Request
from kv_transfer.actions import Refuse
from kv_transfer.ids import TransferId
from wire.work import Rejected, Submit

INVALID = "invalid_request"
DRAINING = "draining"
OVERLOADED = "overloaded"
DUPLICATE = "duplicate"
PAIR_REFUSED = "pair_refused"


class Intake:
    """Says why a Submit is refused, or turns it into a request. Keeps count of nothing."""

    def __init__(self, *, limits: EngineLimits, max_waiting: int) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
        self._limits = limits
        self._max_waiting = max_waiting

    def check(self, submit: Submit, *, num_waiting: int, is_live: bool, is_draining: bool) -> Rejected | None:
        """The refusal, or None. A bad request is not worth another try elsewhere, the others are."""
        if is_draining:
            return refuse(submit, DRAINING, "this node is draining", retryable=True)
        if is_live:
            return refuse(submit, DUPLICATE, f"{submit.tid} is already running here")
        if num_waiting >= self._max_waiting:
            reason = f"{num_waiting} requests wait here, max_waiting is {self._max_waiting}"
            return refuse(submit, OVERLOADED, reason, retryable=True)
        if not math.isfinite(submit.deadline_s):
            return refuse(submit, INVALID, f"deadline_s must be finite, got {submit.deadline_s}")
        try:
            self._limits.check(submit.prompt_ids, submit.num_prompt_tokens, submit.sampling)
        except ValueError as error:
            return refuse(submit, INVALID, str(error))
        return None


def refuse(submit: Submit, code: str, reason: str, *, retryable: bool = False) -> Rejected:
    return Rejected(tid=submit.tid, code=code, retryable=retryable, reason=reason)


def rejected(action: Refuse) -> Rejected:
    """The transfer machine's refusal, in the router's words."""
    return Rejected(tid=action.tid, code=action.code, retryable=action.retryable, reason=action.reason)


def tid_of(request: Request) -> TransferId:
    """A node keys its requests by tid."""
    assert isinstance(request.key, TransferId)
    return request.key


def request_of(submit: Submit, matcher: Matcher | None = None) -> Request:
    """With a grammar, whatever may end a complete output ends the request, ignore_eos or not."""
    sampling = submit.sampling
    if matcher is not None:
        stop_ids = dict.fromkeys((*sampling.stop_token_ids, *matcher.stop_token_ids))
        sampling = replace(sampling, stop_token_ids=tuple(stop_ids))
    return Request(
        key=submit.tid,
        prompt_ids=submit.prompt_ids,
        num_prompt_tokens=submit.num_prompt_tokens,
        sampling=sampling,
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        matcher=matcher,
    )
