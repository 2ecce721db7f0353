"""The router's errors as gRPC has them: a status, and details that clients of any language read.

Owns status codes and details. Must never know requests.
"""

from typing import Any, Never

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from router.errors import RouterError
from router.leaving import forget_frames

_DETAILS = "grpc-status-details-bin"
_DOMAIN = "paceline"


async def abort(context: Any, error: RouterError) -> Never:
    """End the call with the error's status. Its details go along in trailing metadata: for libraries as
    google.rpc.Status, for eyes as text."""
    forget_frames(error)
    status = grpc.StatusCode[error.grpc_status]
    metadata: list[tuple[str, str | bytes]] = [("paceline-code", error.code)]
    if error.param is not None and error.param.isascii():
        metadata.append(("paceline-param", error.param))
    if error.retry_after is not None:
        metadata.append(("retry-after", str(error.retry_after)))
    details = status_pb2.Status(code=status.value[0], message=error.message)
    for detail in _details(error):
        packed = AnyMessage()
        packed.Pack(detail)
        details.details.append(packed)
    metadata.append((_DETAILS, details.SerializeToString()))
    await context.abort(status, error.message, tuple(metadata))
    raise AssertionError("abort raises")


def _details(error: RouterError) -> list[Message]:
    """`reason` is the code in capitals, as the type asks for it."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=_DOMAIN)]
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = Duration(seconds=error.retry_after)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details
