"""Every error the router answers with, and what it looks like at each edge.

    RouterError                  500 INTERNAL             something here is wrong
    ├── BadRequest               400 INVALID_ARGUMENT     the user's; `param` names the field
    │   ├── ContextTooLong       400 INVALID_ARGUMENT     prompt + max_tokens do not fit the model
    │   ├── RequestRefused       400 INVALID_ARGUMENT     a node said no for good; `code` is the node's
    │   ├── BadApiKey            401 UNAUTHENTICATED
    │   ├── ModelNotFound        404 NOT_FOUND
    │   └── BodyTooLarge         413 INVALID_ARGUMENT
    ├── Overloaded               429 RESOURCE_EXHAUSTED   come back after `retry_after_s`
    │   ├── QueueFull                                     too many requests wait here already
    │   ├── QueueTimeout                                  waited here as long as anybody may
    │   ├── NoDecodePages                                 no decode node has room for it now
    │   ├── RateLimited                                   this API key has used up its share
    │   └── NodesBusy                                     every node that was asked had no room
    ├── Unavailable              503 UNAVAILABLE          come back after `retry_after_s`
    │   ├── NoReadyPair                                   no prefill/decode pair has proved itself
    │   ├── RouterDraining                                this router is on its way out
    │   └── AttemptsExhausted                             nodes failed as often as we may try again
    ├── DeadlineExceeded         504 DEADLINE_EXCEEDED
    ├── NodeFailed               500 INTERNAL             a node failed in a way no retry can mend
    ├── TokenConflict            500 INTERNAL             two nodes reported different tokens
    └── ConsumerTooSlow          500 ABORTED              the client stopped reading its stream

Raised here and by the front ends; turned into status codes only by the front ends.
"""

import math
from typing import ClassVar, Final

_MAX_MESSAGE_BYTES: Final = 1000
"""A message goes into a gRPC trailer, which clients take 8 KiB of, and may repeat what the user sent."""


class RouterError(Exception):
    """The root. `code` and `param` may be set per instance, the other edges belong to the class."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.message = _cut(message)
        super().__init__(self.message)
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    @property
    def retry_after(self) -> int | None:
        """Whole seconds, at least one, as clients are told them; None: they are told none."""
        return None if self.retry_after_s is None else max(1, math.ceil(self.retry_after_s))


def _cut(message: str) -> str:
    data = message.encode("utf-8", "replace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return message
    return data[: _MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."


class BadRequest(RouterError):
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    type = "invalid_request_error"
    default_code = "invalid_value"


class ContextTooLong(BadRequest):
    default_code = "context_length_exceeded"


class RequestRefused(BadRequest):
    default_code = "request_refused"


class BadApiKey(BadRequest):
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    default_code = "invalid_api_key"


class ModelNotFound(BadRequest):
    http_status = 404
    grpc_status = "NOT_FOUND"
    default_code = "model_not_found"


class BodyTooLarge(BadRequest):
    http_status = 413
    default_code = "body_too_large"


class Overloaded(RouterError):
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    type = "rate_limit_error"
    default_code = "overloaded"


class QueueFull(Overloaded):
    default_code = "queue_full"


class RateLimited(Overloaded):
    default_code = "rate_limit_exceeded"


class QueueTimeout(Overloaded):
    default_code = "queue_timeout"


class NoDecodePages(Overloaded):
    default_code = "no_decode_pages"


class NodesBusy(Overloaded):
    default_code = "nodes_busy"


class Unavailable(RouterError):
    http_status = 503
    grpc_status = "UNAVAILABLE"
    type = "service_unavailable_error"
    default_code = "unavailable"


class NoReadyPair(Unavailable):
    default_code = "no_ready_pair"


class RouterDraining(Unavailable):
    default_code = "draining"


class AttemptsExhausted(Unavailable):
    default_code = "attempts_exhausted"


class DeadlineExceeded(RouterError):
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    type = "timeout_error"
    default_code = "deadline_exceeded"


class NodeFailed(RouterError):
    default_code = "node_failed"


class TokenConflict(RouterError):
    default_code = "token_conflict"


class ConsumerTooSlow(RouterError):
    grpc_status = "ABORTED"
    default_code = "consumer_too_slow"
