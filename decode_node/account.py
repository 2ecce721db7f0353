"""What a decode node notes of one request between its Submit and its last event. Never acts on it."""

from dataclasses import dataclass

from engine.request import Request
from kv_transfer.geometry import Agreement
from kv_transfer.ids import Incarnation


@dataclass(slots=True, kw_only=True)
class Account:
    """What the router is told at the end of one request."""

    request: Request
    submitted: float
    deadline: float
    peer: Incarnation | None
    started: float = 0.0
    kv_bytes: int = 0
    transport: str = ""
    transfer_s: float = 0.0
    terms: Agreement | None = None  # with the peer, once pages are granted

    @property
    def seedless(self) -> str:
        """What of the drafts differs, where the prompt comes without ours."""
        return str(self.terms.draft_differs) if self.terms is not None and self.terms.is_seedless else ""
