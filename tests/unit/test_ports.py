"""Ports for processes about to start: never one twice, never one in use, never one a client may get."""

import socket
from pathlib import Path

from deploy.ports import NUM_PORTS, free_port


def test_a_port_comes_once_before_all_others_have() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50


def test_a_port_somebody_listens_at_is_passed_over() -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        offered = {free_port() for _ in range(NUM_PORTS)}
    assert port not in offered
    assert len(offered) > NUM_PORTS // 2


def test_outgoing_connections_get_none_of_them() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(not first <= free_port() <= last for _ in range(NUM_PORTS))
