"""Which network the workers of one model use among themselves: none that leaves the machine, unless there are several.

Their libraries (NCCL, gloo) read that from the environment. Invariant: with one node nothing but loopback is used,
whatever the environment says; with several an operator's own choice stands. Rejected: the libraries' own choice, which
is any interface, or whatever the host name stands for.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

import psutil

from octavo.protocol.config import ParallelConfig

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def worker_environment(parallel: ParallelConfig, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of workers, made from `base`."""
    if parallel.num_nodes == 1:
        return {**base, **_variables(LOOPBACK)}
    interface = interface_towards(parallel.master_address or "", parallel.master_port)
    return dict(base) if interface is None else {**_variables(interface), **base}


def _variables(interface: str) -> dict[str, str]:
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}  # without = NCCL takes a prefix


def interface_towards(host: str, port: int) -> str | None:
    """Return the interface that holds the address from which this machine reaches `host`; None when there is no way.

    On node 0 itself that is the one with the address of `host`. Nothing is sent.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own_address = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own_address for each in addresses):
            return name
    return None
