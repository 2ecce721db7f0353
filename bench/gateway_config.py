"""Settings of `paceline bench gateway`: one field = one flag."""

from dataclasses import dataclass

from deploy.config import BUNDLED_MODEL

ROUTERS = ("paceline", "paceline_x2")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayBench:
    """How much is sent. Bad values raise ValueError naming the field."""

    json: str = ""
    """File for the numbers; empty: none."""

    model: str = BUNDLED_MODEL
    """Hugging Face folder, or smollm2: whose tokenizer the router uses."""

    smg: str = ""
    """Environment with the gateway smg, in Rust, to measure on the same kind of stub; empty: none."""

    routers: str = "paceline,paceline_x2"
    """What of ours to measure: paceline, a router; paceline_x2, two of them on one port."""

    concurrency: int = 64
    """Streams at once."""

    requests: int = 600
    """Requests of each load."""

    tokens: int = 100
    """Chunks of every answer."""

    step_ms: float = 20.0
    """A stub sends one token of every request each step, where latency is measured."""

    fast_step_ms: float = 1.0
    """The same where throughput is measured."""

    rounds: int = 3
    """How often everything is measured, everyone in turn; numbers are medians over the rounds."""

    def __post_init__(self) -> None:
        for field, value in (
            ("concurrency", self.concurrency),
            ("requests", self.requests),
            ("tokens", self.tokens),
            ("rounds", self.rounds),
        ):
            if value < 1:
                raise ValueError(f"{field} must be at least 1, got {value!r}")
        for name in self.router_names:
            if name not in ROUTERS:
                raise ValueError(f"routers must be of {', '.join(ROUTERS)}, got {name!r}")
        for field, step in (("step_ms", self.step_ms), ("fast_step_ms", self.fast_step_ms)):
            if step <= 0:
                raise ValueError(f"{field} must be positive, got {step!r}")

    @property
    def router_names(self) -> list[str]:
        return [name.strip() for name in self.routers.split(",") if name.strip()]
