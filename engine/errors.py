"""Errors of the engine.

EngineError
└── OutOfPages        the pool cannot give that many pages now; the caller waits or preempts
"""


class EngineError(Exception):
    """Root of what the engine raises for conditions a caller can act on."""


class OutOfPages(EngineError):
    def __init__(self, *, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages wanted, {available} available")


ALL_FORBIDDEN = "no token is possible: all are forbidden"
"""Why none can be drawn though the model's logits are numbers: grammar and bans left none."""
