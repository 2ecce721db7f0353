"""The settings that both kinds of node have: one field = one flag = one environment variable = one key.

Owns their meanings and the rules they obey; each root's `config.py` says what is its own. Must never import
torch.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from wire.monitoring import NodeMonitoring
from wire.security import ClusterSecurity

DType = Literal["auto", "float32", "bfloat16", "float16"]
TransportName = Literal["auto", "nixl", "grpc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Every instance is valid: bad values raise ValueError naming the field."""

    model: str
    """Hugging Face folder (config.json and safetensors) or .gguf file. Required."""

    served_model_name: str = ""
    """Name the router offers the model under; empty: the name of the folder or file."""

    host: str = "127.0.0.1"
    """Address the gRPC server listens on; 0.0.0.0 for all."""

    port: int
    """Port of the gRPC server; 0 takes a free one."""

    advertise: str = ""
    """host or host:port others reach this node at; empty: derived from host and port."""

    registry: str = "redis://127.0.0.1:6379/0"
    """URL of the registry, a Redis or Valkey server."""

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""

    dtype: DType = "auto"
    """Type of weights and activations; auto: bfloat16 where the device has it, else float32."""

    page_size: int = 16
    """Tokens per KV page. Must be equal on both nodes of a pair."""

    num_pages: int = 0
    """Pages in the KV pool; 0: as many as fit into kv_memory_mib."""

    kv_memory_mib: int = 512
    """Memory for the KV pool in MiB, when num_pages is 0."""

    max_model_len: int = 0
    """Longest prompt plus output in tokens; 0: what the model was made for."""

    chunk_tokens: int = 256
    """Most prompt tokens one step computes; finished pages leave after every chunk."""

    max_running: int
    """Most requests in the running batch."""

    max_waiting: int = 256
    """Most requests waiting; more are rejected and the router tries elsewhere."""

    transport: TransportName = "auto"
    """How KV pages move: nixl, grpc, or auto (nixl where both nodes have it)."""

    checksums: bool = False
    """Check every received page against the sender's checksum."""

    algorithm: str
    """Drafting algorithm; "none" for none. Must be equal on both nodes of a pair."""

    draft: str = ""
    """Folder of the draft model, for the algorithms that have one. Must be equal on both nodes of a pair."""

    draft_options: str = ""
    """Settings of the algorithm, such as "num_steps=4,topk=4"; a name it does not have is refused."""

    threads: int = 0
    """Threads of the engine; 0: chosen from the cores available."""

    drain_timeout_s: float = 30.0
    """Seconds a node that was told to stop may go on with what it runs."""

    security: Annotated[ClusterSecurity, Parameter(name="*")] = ClusterSecurity()
    """Whom the node trusts."""

    monitoring: Annotated[NodeMonitoring, Parameter(name="*")] = NodeMonitoring()
    """How the node can be watched."""

    def __post_init__(self) -> None:
        _check(self)


def _check(config: NodeConfig) -> None:
    _require("model", config.model, bool(config.model), "a folder or a .gguf file")
    _require("port", config.port, 0 <= config.port < 65536, "in [0, 65535]")
    _require("registry", config.registry, "://" in config.registry, "a URL such as redis://host:6379/0")
    is_device = config.device in {"auto", "cpu", "cuda"} or config.device.startswith("cuda:")
    _require("device", config.device, is_device, "auto, cpu, cuda or cuda:N")
    for field, value, least in (
        ("page_size", config.page_size, 1),
        ("num_pages", config.num_pages, 0),
        ("kv_memory_mib", config.kv_memory_mib, 1),
        ("max_model_len", config.max_model_len, 0),
        ("chunk_tokens", config.chunk_tokens, 1),
        ("max_running", config.max_running, 1),
        ("max_waiting", config.max_waiting, 1),
        ("threads", config.threads, 0),
    ):
        _require(field, value, value >= least, f"at least {least}")
    draft_options(config.draft_options)
    _require("drain_timeout_s", config.drain_timeout_s, config.drain_timeout_s >= 0, "at least 0")


def draft_options(text: str) -> dict[str, object]:
    """ "name=value,name=value" by name; whole numbers become int. Raises ValueError for anything else."""
    options: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, is_given, value = part.partition("=")
        _require("draft_options", text, bool(is_given and name and value), "name=value,name=value")
        options[name.strip()] = int(value) if value.strip().lstrip("-").isdigit() else value.strip()
    return options


def advertised_address(config: NodeConfig, bound_port: int) -> str:
    """host:port under which other processes reach this node, once its server knows its port."""
    if config.advertise:
        host, _, port = config.advertise.rpartition(":")
        return config.advertise if host and port.isdigit() else f"{config.advertise}:{bound_port}"
    host = "127.0.0.1" if config.host in {"0.0.0.0", "::", ""} else config.host
    return f"{host}:{bound_port}"


def advertised_metrics(address: str, bound_port: int | None) -> str:
    """host:port of /metrics for other processes, on the host of the node's own address; "" for none."""
    return "" if bound_port is None else f"{address.rpartition(':')[0]}:{bound_port}"


def _require(field: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{field} must be {rule}, got {value!r}")
