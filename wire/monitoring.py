"""The settings of every process that say how it can be watched. Flags of their own, as all others.

Owns names and rules. Must never know what is measured.
"""

from dataclasses import dataclass

from wire.logs import LogFormat, LogLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """Every instance is valid: bad values raise ValueError naming the field."""

    log_level: LogLevel = "info"
    """Least severe message that is logged: debug, info, warning or error."""

    log_format: LogFormat = "text"
    """text for people, json for machines: one object a line."""

    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector (OTLP over gRPC, such as http://host:4317); empty: no traces."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint and "://" not in self.otlp_endpoint:
            rule = "a URL such as http://host:4317"
            raise ValueError(f"otlp_endpoint must be {rule}, got {self.otlp_endpoint!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMonitoring(Monitoring):
    """A node has no HTTP server but this one."""

    metrics_port: int = 0
    """Port of /metrics and /health over HTTP; 0 takes a free one, which the registry knows; -1: none."""

    def __post_init__(self) -> None:
        Monitoring.__post_init__(self)
        if not -1 <= self.metrics_port < 65536:
            raise ValueError(f"metrics_port must be in [-1, 65535], got {self.metrics_port!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterMonitoring(Monitoring):
    """What operators look at may have a port of its own."""

    admin_port: int = 0
    """Port of an HTTP server of its own for /metrics, /dashboard and all other paths; the main port then has
    neither. 0: they are on the main port."""

    def __post_init__(self) -> None:
        Monitoring.__post_init__(self)
        if not 0 <= self.admin_port < 65536:
            raise ValueError(f"admin_port must be in [0, 65535], got {self.admin_port!r}")
