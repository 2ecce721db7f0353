"""Settings of one decode node: one field = one flag = one environment variable = one key in the file.

Owns names, defaults and meanings; `wire.node_config` owns the rules both kinds of node share.
"""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from wire.monitoring import NodeMonitoring
from wire.node_config import DType, TransportName, check_node_config
from wire.security import ClusterSecurity


@dataclass(frozen=True, slots=True, kw_only=True)
class LettingIn:
    """Every instance is valid. Each field is a flag of its own, as all others."""

    reserve_tokens: int = 512
    """Tokens of growth counted on for every running request before another one is let in."""

    allow_seedless: bool = False
    """Serve prompts of prefill nodes that run another draft, or none; fewer of our drafts stand then."""

    def __post_init__(self) -> None:
        if self.reserve_tokens < 0:
            raise ValueError(f"reserve_tokens must be at least 0, got {self.reserve_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Every instance is valid: bad values raise ValueError naming the field."""

    model: str
    """Hugging Face folder (config.json and safetensors) or .gguf file. Required."""

    served_model_name: str = ""
    """Name the router offers the model under; empty: the name of the folder or file."""

    host: str = "127.0.0.1"
    """Address the gRPC server listens on; 0.0.0.0 for all."""

    port: int = 7201
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

    max_running: int = 32
    """Most requests in the running batch."""

    letting_in: Annotated[LettingIn, Parameter(name="*")] = LettingIn()
    """Which requests join the batch, and when."""

    max_waiting: int = 256
    """Most requests waiting; more are rejected and the router tries elsewhere."""

    transport: TransportName = "auto"
    """How KV pages move: nixl, grpc, or auto (nixl where both nodes have it)."""

    checksums: bool = False
    """Check every received page against the sender's checksum."""

    algorithm: str = "ngram"
    """Drafting algorithm: "ngram", "none" for plain decoding, or a plugin as package.module:factory.
    Must be equal on both nodes of a pair."""

    draft: str = ""
    """Folder of the draft model, for the algorithms that have one. Must be equal on both nodes of a pair."""

    draft_options: str = ""
    """Settings of the algorithm, such as "num_steps=4,topk=4", and acceptance, budget, budget_slots,
    simulate_acceptance; any other name is refused."""

    threads: int = 0
    """Threads of the engine; 0: chosen from the cores available."""

    drain_timeout_s: float = 30.0
    """Seconds a node that was told to stop may go on with what it runs."""

    security: Annotated[ClusterSecurity, Parameter(name="*")] = ClusterSecurity()
    """Whom the node trusts."""

    monitoring: Annotated[NodeMonitoring, Parameter(name="*")] = NodeMonitoring()
    """How the node can be watched."""

    def __post_init__(self) -> None:
        check_node_config(self)
