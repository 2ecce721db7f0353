"""Finds TCP ports for processes that are about to start on this host.

Owns which port is offered next. Must never know who listens at it.
"""

import functools
import itertools
import os
import socket
from collections.abc import Iterator

from deploy.errors import PortTaken

# Below what Linux and macOS hand to outgoing connections: none of those can take a port between its
# choice and its use, nor while the process that had it is started again.
FIRST_PORT, NUM_PORTS, NUM_SLICES = 10_000, 400, 50
_APART = 37  # ports between the beginnings of two processes; prime to NUM_PORTS


def free_port() -> int:
    """A port of 127.0.0.1 nobody listens at now, and another one at each call.

    Every process asks in its own slice of the range, so that two test runs side by side rarely meet; those
    that share one begin far apart in it.
    Raises OSError when no port of the slice is free.
    """
    for port in itertools.islice(_candidates(), NUM_PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among the {NUM_PORTS} from {_first_port()}")


def check_free(host: str, port: int) -> None:
    """Raises PortTaken when this host cannot listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what just closed is no obstacle
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _first_port() -> int:
    return FIRST_PORT + os.getpid() % NUM_SLICES * NUM_PORTS


@functools.cache
def _candidates() -> Iterator[int]:
    begin = os.getpid() // NUM_SLICES * _APART
    return itertools.cycle(_first_port() + (begin + count) % NUM_PORTS for count in range(NUM_PORTS))
