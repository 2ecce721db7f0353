"""Identities that every message carries. See PROTOCOL.md, "Identities"."""

import uuid
from typing import NamedTuple, NewType

Incarnation = NewType("Incarnation", str)
"""One uuid per process start: a node that comes back at the same address is a new peer."""


class TransferId(NamedTuple):
    """One dispatch of one request. The router raises `attempt` on each dispatch."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


def new_incarnation() -> Incarnation:
    return Incarnation(uuid.uuid4().hex)
