"""What is the user's fault among the failures of nodes, told by the names the user knows.

Owns the wording. Must never know what happens next.
"""

from router.attempt import Broken
from router.errors import RequestRefused
from router.requests import GenerateRequest
from wire.work import BAD_GRAMMAR

_NO_TOKEN = "no_token"


def refused(request: GenerateRequest, broken: Broken) -> RequestRefused | None:
    """The refusal that a final failure is; None when it is the node's own."""
    if broken.code == _NO_TOKEN:
        return _left_no_token(request)
    if broken.cause != "rejected":
        return None
    if broken.code != BAD_GRAMMAR or request.constraint is None:
        return RequestRefused(broken.reason, code=broken.code)
    field = request.constraint.field
    return RequestRefused(
        f"{field} cannot be used: {broken.reason.removeprefix('grammar: ')}", code=broken.code, param=field
    )


def _left_no_token(request: GenerateRequest) -> RequestRefused | None:
    """Each may be fine alone; None when the request forbids nothing."""
    sampling, constraint = request.sampling, request.constraint
    asked = {
        "" if constraint is None else constraint.field: constraint is not None,
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_words": bool(sampling.banned_sequences),
        "min_tokens": sampling.min_tokens > 0,
    }
    fields = [field for field, is_asked in asked.items() if is_asked]
    if not fields:
        return None
    return RequestRefused(
        f"{' and '.join(fields)} must leave a token to go on with, and left none",
        code=_NO_TOKEN,
        param=fields[0],
    )
