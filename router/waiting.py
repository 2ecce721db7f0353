"""The router's settings for requests that must wait. Flags of their own, as all others.

Owns names and rules. Must never know a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from router.tenants import weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Every instance is valid: bad values raise ValueError naming the field."""

    max_queue: int = 1024
    """Requests that may wait; more are refused with 429. 0: nobody waits."""

    max_queue_bytes: int = 64 * 1024 * 1024
    """Bytes of prompts (4 a token) that may wait; more are refused with 429."""

    max_queue_s: float = 30.0
    """Longest a request may wait before it is refused with 429."""

    tenant_header: str = ""
    """Header or gRPC metadata, set by a trusted proxy, that names a tenant; empty: the API key names it."""

    tenant_weights: str = ""
    """Shares of tenants where requests wait, "name=2,other=0.5"; others have their key's weight, or 1."""

    def __post_init__(self) -> None:
        for field, value, least in (
            ("max_queue", self.max_queue, 0),
            ("max_queue_bytes", self.max_queue_bytes, 1),
        ):
            if value < least:
                raise ValueError(f"{field} must be at least {least}, got {value!r}")
        if self.max_queue_s <= 0:
            raise ValueError(f"max_queue_s must be positive, got {self.max_queue_s!r}")
        weights_of(self.tenant_weights)

    def weights(self, of_keys: Mapping[str, float]) -> Mapping[str, float]:
        """Shares by tenant. API keys have their own, unless it is a header that names tenants."""
        return {**({} if self.tenant_header else of_keys), **weights_of(self.tenant_weights)}
