"""The seam to tracing: spans as plain values, and who takes them. Without an endpoint nobody does.

Owns what a span is here. Must never import a tracing library: `wire.otel` is loaded when it is asked for.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that is over. Times are those of the clock that the tracer was made for."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""
    children: tuple["Span", ...] = ()


class OpenSpan(Protocol):
    """Something that goes on."""

    @property
    def context(self) -> str:
        """W3C traceparent for those who do a part of it elsewhere."""
        ...

    def end(self, *, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None: ...


class Tracer(Protocol):
    """`parent` is a W3C traceparent; "" or one that is malformed begins a new trace."""

    def start(self, name: str, *, parent: str, at: float) -> OpenSpan: ...

    def record(self, span: Span, *, parent: str) -> None: ...

    def close(self) -> None:
        """Hand everything over; blocks for seconds at most."""
        ...


@dataclass(frozen=True, slots=True)
class _Unseen:
    context: str

    def end(self, *, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None:
        pass


class NoTraces:
    """Takes nothing down, and hands a context that came along on unchanged."""

    def start(self, name: str, *, parent: str, at: float) -> OpenSpan:  # noqa: ARG002  the seam's arguments
        return _Unseen(parent)

    def record(self, span: Span, *, parent: str) -> None:
        pass

    def close(self) -> None:
        pass


NO_TRACES = NoTraces()


def tracer_for(endpoint: str, *, service: str, instance: str, wall_offset_s: float) -> Tracer:
    """Sends spans to an OTLP collector; none for "". `wall_offset_s`: wall clock less the clock of spans.

    Raises ValueError when the library is not installed.
    """
    if not endpoint:
        return NO_TRACES
    try:
        module = importlib.import_module("wire.otel")
    except ImportError as error:
        raise ValueError(f"otlp_endpoint needs paceline[otel]: {error}") from error
    create: Callable[..., Tracer] = vars(module)["create"]
    return create(endpoint, service=service, instance=instance, wall_offset_s=wall_offset_s)
