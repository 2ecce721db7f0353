"""What both kinds of node configuration have in common: the rules their values obey.

Owns no defaults and reads nothing: each root's `config.py` has its own fields. Must never import torch.
"""

from typing import Literal, Protocol

from wire.monitoring import NodeMonitoring
from wire.security import ClusterSecurity

DType = Literal["auto", "float32", "bfloat16", "float16"]
TransportName = Literal["auto", "nixl", "grpc"]


class NodeConfig(Protocol):
    """The settings that wiring shared by both roles may read."""

    @property
    def model(self) -> str: ...
    @property
    def served_model_name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def advertise(self) -> str: ...
    @property
    def registry(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def kv_memory_mib(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def transport(self) -> TransportName: ...
    @property
    def checksums(self) -> bool: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def draft(self) -> str: ...
    @property
    def draft_options(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def drain_timeout_s(self) -> float: ...
    @property
    def security(self) -> ClusterSecurity: ...
    @property
    def monitoring(self) -> NodeMonitoring: ...


def check_node_config(config: NodeConfig) -> None:
    """Raise ValueError naming the first field that is out of range, and its value."""
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
