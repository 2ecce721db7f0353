"""One NIXL agent as both ends of the `nixl` transport use it: a pool registered with the UCX backend.

Owns its configuration and the list of what NIXL may raise. Must never know a peer or a write.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nixl._bindings as nixl_bindings
from nixl._api import nixl_agent, nixl_agent_config

from kv_transfer.transport import PoolMemory

PROGRESS_DELAY_US = 100

_RDMA_DEVICES = Path("/sys/class/infiniband")

NIXL_ERRORS: tuple[type[Exception], ...] = (
    nixl_bindings.nixlBackendError,
    nixl_bindings.nixlCancelledError,
    nixl_bindings.nixlInvalidParamError,
    nixl_bindings.nixlMismatchError,
    nixl_bindings.nixlNotAllowedError,
    nixl_bindings.nixlNotFoundError,
    nixl_bindings.nixlNotPostedError,
    nixl_bindings.nixlNotSupportedError,
    nixl_bindings.nixlRemoteDisconnectError,
    nixl_bindings.nixlRepostActiveError,
    nixl_bindings.nixlUnknownError,
)


def default_ucx_options(
    environment: Mapping[str, str] = os.environ, *, rdma_devices: Path = _RDMA_DEVICES
) -> dict[str, str]:
    """UCX settings that keep the teardown guarantee, and keep a write together where only sockets carry it:
    UCX would split each page over the connections of all network interfaces and wait for the slower one.
    UCX_TLS and UCX_MAX_RMA_RAILS in the environment have the last word.
    """
    settings = {"TLS": "^cma"}
    if not (rdma_devices.is_dir() and any(rdma_devices.iterdir())):
        settings["MAX_RMA_RAILS"] = "1"
    chosen = [f"{key}={value}" for key, value in settings.items() if f"UCX_{key}" not in environment]
    return {"engine_config": ",".join(chosen)} if chosen else {}


def make_agent(name: str, memory: PoolMemory, ucx_options: dict[str, str]) -> tuple[Any, Any]:
    """An agent with the pool registered, and the registration.

    NIXL's Python class hard-codes a progress thread that spins on a whole core, so it wraps an agent of our
    own configuration instead: a thread that wakes on traffic and every PROGRESS_DELAY_US.
    """
    config = nixl_bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = PROGRESS_DELAY_US
    config.syncMode = nixl_bindings.NIXL_THREAD_SYNC_NONE
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.agent = nixl_bindings.nixlAgent(name, config)
    agent.create_backend("UCX", dict(ucx_options))
    return agent, agent.register_memory([(memory.address, memory.buffer.nbytes, 0, "")], "DRAM")
