"""Settings of the tools that are not themselves part of a cluster: `up`, `demo`, `chat`.

Same rule as for the processes: one field = one flag = one environment variable = one key in the file.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

BUNDLED_MODEL = "smollm2"
DEMO_ALGORITHM = "eagle3"
"""The fastest on chat prompts to the bundled model; docs/benchmarks.md has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """A cluster on this machine. Empty values leave a setting to the processes' own configuration,
    which they read from the same environment and the same --config file."""

    model: str = BUNDLED_MODEL
    """Hugging Face folder, .gguf file, or smollm2: SmolLM2-135M-Instruct from its pip package."""

    prefill: int = 1
    """How many prefill nodes; 0: the decode nodes prefill for themselves."""

    decode: int = 1
    """How many decode nodes."""

    host: str = "127.0.0.1"
    """Address the router listens on; 0.0.0.0 for all."""

    port: int = 8000
    """Port of the router's HTTP server; 0 takes a free one."""

    grpc_port: int = 50051
    """Port of the router's gRPC server; 0 takes a free one."""

    registry: str = ""
    """URL of a Redis or Valkey server to use; empty: an embedded one is started."""

    dtype: Literal["", "auto", "float32", "bfloat16", "float16"] = ""
    """Type of weights and activations on every node."""

    transport: Literal["", "auto", "nixl", "grpc"] = ""
    """How KV pages move between the nodes."""

    algorithm: str = ""
    """Drafting algorithm of every node, such as ngram, or none."""

    draft: str = ""
    """Folder of the draft model, for the algorithms that have one; empty: the bundled model's own, if any."""

    draft_options: str = ""
    """Settings of the algorithm, such as "num_steps=4,topk=4"; empty: those of a bundled head."""

    threads: int = 0
    """Threads of each node's engine; 0: chosen from the cores available and the number of nodes."""

    log_dir: str = ""
    """Folder for the logs, one file per process; empty: a new one under the temporary folder."""

    ready_timeout_s: float = 300.0
    """Seconds until the first generation must have passed through a pair."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("prefill", self.prefill, 0),
            ("decode", self.decode, 1),
            ("threads", self.threads, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")
        for name, port in (("port", self.port), ("grpc_port", self.grpc_port)):
            if not 0 <= port < 65536:
                raise ValueError(f"{name} must be in [0, 65535], got {port!r}")
        if not 0 < self.ready_timeout_s < math.inf:
            raise ValueError(f"ready_timeout_s must be a positive number, got {self.ready_timeout_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """One chat with a running gateway."""

    url: str = "http://127.0.0.1:8000"
    """Base URL of the gateway, with or without /v1."""

    api_key: str = field(default="", repr=False)
    """API key, where the gateway asks for one; better in the environment."""

    prompt: str = ""
    """Ask this and exit; empty: read questions from the terminal until end of file."""

    system: str = ""
    """System message."""

    max_tokens: int = 256
    """Most tokens of one answer."""

    temperature: float = 0.0
    """0 takes the most likely token each time."""

    seed: int | None = None
    """Same seed, same answer."""
