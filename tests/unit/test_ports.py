"""Ports for processes about to start: never one twice, never one in use, never one a client may get."""

import socket

from deploy.ports import FIRST_PORT, NUM_PORTS, free_port


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


def test_all_lie_below_what_systems_give_to_outgoing_connections() -> None:
    assert all(FIRST_PORT <= free_port() < 30_000 for _ in range(NUM_PORTS))
