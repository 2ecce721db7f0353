"""Settings of the router: one field = one flag = one environment variable = one key in the file."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from router.access import Access
from router.policies import policy_named
from router.text.parsers.catalogue import check_names
from router.waiting import Waiting
from wire.monitoring import RouterMonitoring
from wire.security import ClusterSecurity


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Every instance is valid: bad values raise ValueError naming the field."""

    model: str
    """Hugging Face folder of the served model; the router reads its tokenizer and chat template. Required."""

    served_model_name: str = ""
    """Name clients ask for; empty: the name the nodes go by."""

    host: str = "127.0.0.1"
    """Address the HTTP and gRPC servers listen on; 0.0.0.0 for all."""

    port: int = 8000
    """Port of the HTTP server; 0 takes a free one."""

    grpc_port: int = 50051
    """Port of the gRPC server; 0 takes a free one."""

    reuse_port: bool = False
    """Share both ports with other routers on this host; the system spreads connections over them."""

    registry: str = "redis://127.0.0.1:6379/0"
    """URL of the registry, a Redis or Valkey server."""

    policy: str = "least_load"
    """How nodes are chosen: least_load, power_of_two, prefix or round_robin."""

    policy_seed: int = 0
    """Seed of policies that draw at random."""

    colocated: bool = False
    """Decode nodes compute all prompts themselves; no prefill node is needed."""

    local_prompt_tokens: int = 0
    """Decode nodes compute prompts themselves of which they lack so many tokens or fewer; 0: none."""

    min_prefill: int = 1
    """Prefill nodes that must have proved themselves before /ready says yes."""

    min_decode: int = 1
    """Decode nodes that must have proved themselves before /ready says yes."""

    max_in_flight: int = 256
    """Generations at once; more wait their turn."""

    waiting: Annotated[Waiting, Parameter(name="*")] = Waiting()
    """Who waits for a turn, how many and how long."""

    max_attempts: int = 3
    """How often one request is tried when nodes fail."""

    request_timeout_s: float = 600.0
    """Longest a request may take."""

    canary_timeout_s: float = 30.0
    """Longest a pair of nodes may take to prove itself."""

    drain_timeout_s: float = 30.0
    """Longest running requests go on after SIGTERM."""

    max_body_bytes: int = 16 * 1024 * 1024
    """Larger request bodies are refused with 413."""

    tool_call_parser: str = "auto"
    """How the model writes tool calls: hermes, llama3_json, mistral, none, or auto: as its template shows."""

    reasoning_parser: str = "auto"
    """How the model marks reasoning: qwen3, deepseek_r1, mistral, none, or auto: as its template shows."""

    access: Annotated[Access, Parameter(name="*")] = Access()
    """Who may use the router."""

    security: Annotated[ClusterSecurity, Parameter(name="*")] = ClusterSecurity()
    """How the router shows the nodes that it belongs to them."""

    monitoring: Annotated[RouterMonitoring, Parameter(name="*")] = RouterMonitoring()
    """How the router can be watched."""

    def __post_init__(self) -> None:
        _require("model", self.model, bool(self.model), "a folder with tokenizer files")
        _require("registry", self.registry, "://" in self.registry, "a URL such as redis://host:6379/0")
        policy_named(self.policy)
        check_names(tool_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser)
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
