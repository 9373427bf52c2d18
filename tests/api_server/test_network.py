"""Which interface the workers' libraries get."""

from __future__ import annotations

import socket

import pytest

from octavo.api_server import network
from octavo.api_server.network import interface_towards, worker_environment
from octavo.protocol.config import ParallelConfig

LOOPBACK_ONLY = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}


def two_nodes(address: str) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=2, num_nodes=2, master_address=address, cluster_key_file="key")


def test_on_one_node_nothing_but_loopback_is_used() -> None:
    base = {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth0"}
    assert worker_environment(ParallelConfig(tensor_parallel_size=2), base) == {"PATH": "/bin", **LOOPBACK_ONLY}


def test_between_nodes_it_is_the_interface_towards_node_0() -> None:
    assert worker_environment(two_nodes("127.0.0.1"), {"PATH": "/bin"}) == {"PATH": "/bin", **LOOPBACK_ONLY}


def test_between_nodes_the_operators_choice_stands() -> None:
    chosen = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth7"}
    assert worker_environment(two_nodes("127.0.0.1"), chosen) == chosen


def test_an_address_that_cannot_be_found_leaves_the_choice_to_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(network.socket, "getaddrinfo", fail)
    assert interface_towards("nowhere.example", 1) is None
    assert worker_environment(two_nodes("nowhere.example"), {"PATH": "/bin"}) == {"PATH": "/bin"}
