"""Configuration of the router process: one field, one flag, one environment variable, one key in a file."""

from dataclasses import dataclass

from wire.node_config import LogLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Where to listen, whom to serve, and how much. Every instance is valid: bad values raise ValueError.

    model: folder with the model's tokenizer files.
    served_model_name: the model's name for clients; "" takes the nodes' name.
    host, port, grpc_port: listening addresses; port 0 lets the system choose.
    registry: URL of the node registry.
    policy, policy_seed: how nodes are chosen.
    colocated: decode nodes compute all prompts themselves; there need be no prefill node.
    local_prompt_tokens: decode nodes compute prompts up to that long.
    min_prefill, min_decode: how many nodes must have proved themselves before /ready says so.
    max_in_flight: generations at once; more are refused with 429.
    max_attempts: how often a request is tried on failing nodes.
    request_timeout_s: deadline of a request.
    canary_timeout_s: how long a pair may take to prove itself.
    drain_timeout_s: how long running requests may go on after SIGTERM.
    max_body_bytes: larger request bodies are refused with 413.
    api_key: bearer token clients must show; "" lets everybody in.
    """

    model: str
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    registry: str = "redis://127.0.0.1:6379/0"
    policy: str = "least_load"
    policy_seed: int = 0
    colocated: bool = False
    local_prompt_tokens: int = 0
    min_prefill: int = 1
    min_decode: int = 1
    max_in_flight: int = 256
    max_attempts: int = 3
    request_timeout_s: float = 600.0
    canary_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 16 * 1024 * 1024
    api_key: str = ""
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        _require("model", self.model, bool(self.model), "a folder with tokenizer files")
        _require("registry", self.registry, "://" in self.registry, "a URL such as redis://host:6379/0")
        for field, value in (("port", self.port), ("grpc_port", self.grpc_port)):
            _require(field, value, 0 <= value < 65536, "in [0, 65535]")
        for field, value, least in (
            ("local_prompt_tokens", self.local_prompt_tokens, 0),
            ("min_prefill", self.min_prefill, 0),
            ("min_decode", self.min_decode, 1),
            ("max_in_flight", self.max_in_flight, 1),
            ("max_attempts", self.max_attempts, 1),
            ("max_body_bytes", self.max_body_bytes, 1),
        ):
            _require(field, value, value >= least, f"at least {least}")
        for field, seconds in (
            ("request_timeout_s", self.request_timeout_s),
            ("canary_timeout_s", self.canary_timeout_s),
        ):
            _require(field, seconds, seconds > 0, "positive")
        _require("drain_timeout_s", self.drain_timeout_s, self.drain_timeout_s >= 0, "at least 0")


def _require(field: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{field} must be {rule}, got {value!r}")
