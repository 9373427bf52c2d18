"""How a tensor-parallel group comes to be: which transport it takes, and how its ranks find each other.

On one machine nothing is reachable from outside: the ranks meet over a socket and a file in the private directory, and
gloo is bound to the loopback interface. Across machines rank 0 keeps the store of the ranks on node 0's address, one
port above the steps', and each rank binds gloo to the interface that leads there. NCCL takes its interface from the
environment that the supervisor gives to workers, which is the same one. What the ranks send each other there is neither
encrypted nor authenticated, as no library for it can be: such a network must be private.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import Store

from octavo.protocol.config import EngineConfig, ParallelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.distributed import RankLostError, TensorParallelGroup
from octavo.worker.distributed_backend import BackendGroup, NcclGroup, OrderedGroup, await_ranks
from octavo.worker.distributed_meeting import meet, share_memory, share_text
from octavo.worker.shared_memory_group import SharedMemoryGroup, memory_num_bytes

MEETING_TIMEOUT_S = 300.0  # of ranks that one supervisor starts at once; it knows sooner when one of them ends
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
LOOPBACK_ADDRESS = "127.0.0.1"
ARCHITECTURES_WITH_ORDERED_STORES = ("x86_64", "AMD64")


def connect_group(config: EngineConfig, rank: int, device: torch.device) -> TensorParallelGroup:
    """Return the group of two or more ranks; see `make_group`."""
    parallel = config.parallel
    if parallel.num_nodes > 1:
        return _backend_group(_tcp_store(parallel, rank), rank, parallel, device)
    size = parallel.tensor_parallel_size
    try:
        peers = meet(config.ipc_directory, rank, size, MEETING_TIMEOUT_S)
        if device.type == "cpu" and has_shared_memory():
            memory_fd = share_memory(peers, rank, memory_num_bytes(size))
            try:
                return SharedMemoryGroup(rank, size, memory_fd, peers)
            finally:
                os.close(memory_fd)
        name = share_text(peers, rank, f"ranks-{secrets.token_hex(8)}")  # ranks of an earlier start used another one
        store = distributed.FileStore(str(Path(config.ipc_directory) / name), size)
    except RankLostError as problem:
        raise StartupError(ExitCode.FAILURE, str(problem)) from problem
    return _backend_group(store, rank, parallel, device)


def has_shared_memory() -> bool:
    """Return whether ranks on this machine can see each other's writes in order, in memory without a name."""
    return platform.machine() in ARCHITECTURES_WITH_ORDERED_STORES and hasattr(os, "memfd_create")


def _tcp_store(parallel: ParallelConfig, rank: int) -> Store:
    """Return the store when every rank has come; raises StartupError(NODE_LOST) naming the nodes that did not."""
    host, port, timeout_s = parallel.master_address or "", parallel.master_port + 1, parallel.node_timeout_s
    options = {"wait_for_workers": False, "timeout": timedelta(seconds=timeout_s)}
    if rank == 0:
        listener = _listen(host, port)
        store = distributed.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)
    else:
        try:
            store = distributed.TCPStore(host, port, is_master=False, **options)
        except RuntimeError as problem:
            raise StartupError(
                ExitCode.NODE_LOST, f"rank 0 on node 0 was not reached at {host}:{port} within {timeout_s:g} s"
            ) from problem
    missing = await_ranks(store, "start", rank, parallel.tensor_parallel_size, timeout_s)
    if missing:
        nodes = sorted({number // parallel.num_local_workers for number in missing})
        raise StartupError(
            ExitCode.NODE_LOST,
            f"ranks {_listed(missing)} of node {_listed(nodes)} did not come to {host}:{port} within {timeout_s:g} s",
        )
    return store


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on this address alone; torch's store by itself would listen on every interface."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as problem:
        raise StartupError(ExitCode.USAGE, f"--master-addr {host}, port {port}: {problem.strerror}") from problem


def _own_address(parallel: ParallelConfig) -> str:
    """Return this machine's address on the interface that leads to node 0; loopback when there is one node."""
    if parallel.num_nodes == 1:
        return LOOPBACK_ADDRESS
    target = socket.getaddrinfo(parallel.master_address, parallel.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(*target[:2]) as probe:
        probe.connect(target[4])  # sends nothing, but chooses the way
        return str(probe.getsockname()[0])


def _backend_group(store: Store, rank: int, parallel: ParallelConfig, device: torch.device) -> BackendGroup:
    size = parallel.tensor_parallel_size
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        group = OrderedGroup if parallel.deterministic else NcclGroup
        return group(distributed.ProcessGroupNCCL(store, rank, size, options), store, rank, size)
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_own_address(parallel))]
    options._timeout = COLLECTIVE_TIMEOUT
    return OrderedGroup(distributed.ProcessGroupGloo(store, rank, size, options), store, rank, size)
