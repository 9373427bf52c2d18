"""Which transport a group takes, how nodes that do not come are named, and what NCCL is asked to do."""

from __future__ import annotations

import platform
import socket
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from rank_processes import broadcast_checked, group_config
from torch import distributed

from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker import distributed_setup
from octavo.worker.distributed import SINGLE_RANK, RankLostError, make_group
from octavo.worker.distributed_backend import NcclGroup, OrderedGroup
from octavo.worker.distributed_checksum import StepChecksum, require_same, with_checksum
from octavo.worker.shared_memory_group import SharedMemoryGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NODE_TIMEOUT_S = 1.5


def nodes_config(directory, size: int, num_nodes: int, port: int, host: str = "127.0.0.1"):
    return group_config(
        directory,
        size,
        num_nodes=num_nodes,
        master_address=host,
        master_port=port,
        cluster_key_file="/unused",
        node_timeout_s=NODE_TIMEOUT_S,
    )


@pytest.fixture
def port():
    """A port of which the next one is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1] - 1


def make_all(config, device=CPU, ranks=None):
    ranks = range(config.parallel.tensor_parallel_size) if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(make_group, config, rank, device) for rank in ranks]
    return [future.exception() or future.result() for future in futures]


def test_one_rank_needs_nobody(tmp_path):
    group = make_group(group_config(tmp_path, 1), 0, CPU)
    assert group is SINGLE_RANK
    x = torch.ones(3, 2)
    assert group.all_reduce(x) is group.gather_columns(x, [2]) is group.broadcast(x) is x
    assert broadcast_checked(group, x, 0) is x
    assert not list(tmp_path.iterdir())


def test_cpus_of_one_machine_share_memory(tmp_path):
    groups = make_all(group_config(tmp_path, 3))
    assert [type(group) for group in groups] == [SharedMemoryGroup] * 3
    assert [(group.rank, group.size) for group in groups] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_cpus_that_reorder_stores_take_gloo_on_loopback(tmp_path, monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    before = {(entry.laddr, entry.pid) for entry in psutil.Process().net_connections()}
    groups = make_all(group_config(tmp_path, 2))
    assert [type(group) for group in groups] == [OrderedGroup] * 2
    opened = [entry for entry in psutil.Process().net_connections() if (entry.laddr, None) not in before]
    assert opened
    assert {entry.laddr.ip for entry in opened} == {"127.0.0.1"}


def test_nodes_that_do_not_come_are_named(tmp_path, port):
    config = nodes_config(tmp_path, 6, 3, port)
    started_s = time.monotonic()
    first, second = make_all(config, ranks=[0, 1])
    assert time.monotonic() - started_s < 60
    for problem in (first, second):
        assert isinstance(problem, StartupError)
        assert problem.exit_code is ExitCode.NODE_LOST
    words = f"ranks 2, 3, 4, 5 of node 1, 2 did not come to 127.0.0.1:{port + 1} within 1.5 s"
    assert words in {first.message, second.message}


def test_a_missing_node_0_is_named(tmp_path, port):
    (problem,) = make_all(nodes_config(tmp_path, 2, 2, port), ranks=[1])
    assert isinstance(problem, StartupError)
    assert problem.exit_code is ExitCode.NODE_LOST
    assert problem.message == f"rank 0 on node 0 was not reached at 127.0.0.1:{port + 1} within 1.5 s"


def test_an_address_of_another_machine_is_refused(tmp_path, port):
    (problem,) = make_all(nodes_config(tmp_path, 2, 2, port, host="192.0.2.1"), ranks=[0])
    assert isinstance(problem, StartupError)
    assert problem.exit_code is ExitCode.USAGE
    assert "--master-addr 192.0.2.1" in problem.message


def test_ranks_across_nodes_listen_on_the_masters_interface_only(tmp_path, port):
    before = {entry.laddr for entry in psutil.Process().net_connections()}
    groups = make_all(nodes_config(tmp_path, 2, 2, port, host="127.0.0.2"))
    assert [type(group) for group in groups] == [OrderedGroup] * 2
    listening = [
        entry.laddr
        for entry in psutil.Process().net_connections()
        if entry.status == psutil.CONN_LISTEN and entry.laddr not in before
    ]
    assert ("127.0.0.2", port + 1) in listening
    assert all(address.ip.startswith("127.") for address in listening)


class FakeWork:
    def wait(self) -> None:
        """NCCL's waits on the stream."""


class FakeNccl:
    """Stands for torch's NCCL backend, which only CUDA builds have: as if all ranks brought the same."""

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.calls: list[str] = []

    def allgather(self, outputs, tensor):
        self.calls.append("allgather")
        for output in outputs:
            output.copy_(tensor)
        return FakeWork()

    def allreduce(self, tensor):
        self.calls.append("allreduce")
        tensor.mul_(self.size)
        return FakeWork()

    def broadcast(self, tensor, root):
        self.calls.append(f"broadcast from {root}")
        return FakeWork()

    def gather(self, outputs, tensor, root):
        self.calls.append(f"gather of {tuple(tensor.shape)} to {root}")
        assert len(outputs) == (self.size if self.rank == root else 0)
        for output in outputs:
            output.copy_(tensor)
        return FakeWork()


@pytest.fixture(autouse=True)
def _nccl(monkeypatch):
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", FakeNccl, raising=False)


def test_gpus_of_one_machine_meet_in_a_file(tmp_path):
    groups = make_all(group_config(tmp_path, 2), CUDA)
    assert [type(group) for group in groups] == [NcclGroup] * 2
    for rank, group in enumerate(groups):
        backend = group.backend
        assert (backend.rank, backend.size) == (rank, 2)
        assert isinstance(backend.store, distributed.FileStore)
        assert backend.options._timeout == distributed_setup.COLLECTIVE_TIMEOUT


def test_gpus_of_several_machines_meet_at_node_0(tmp_path, port):
    groups = make_all(nodes_config(tmp_path, 2, 2, port), CUDA)
    assert [type(group) for group in groups] == [NcclGroup] * 2
    assert isinstance(groups[1].backend.store, distributed.TCPStore)


def test_what_nccl_is_asked_to_do(tmp_path):
    first, second = make_all(group_config(tmp_path, 2), CUDA)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(first.all_reduce(x.clone()), 2 * x)
    assert torch.equal(first.broadcast(x), x)
    assert torch.equal(first.gather_columns(x, [3, 2]), torch.cat((x, x[:, :2]), dim=1))
    assert second.gather_columns(x[:, :2], [3, 2]) is None
    assert first.backend.calls == ["allreduce", "broadcast from 0", "gather of (2, 3) to 0"]
    assert second.backend.calls == ["gather of (2, 3) to 0"], "narrow parts travel as wide as the others"


def test_deterministic_gpus_sum_in_the_order_of_the_ranks(tmp_path):
    first, _ = make_all(group_config(tmp_path, 2, deterministic=True), CUDA)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(first.all_reduce(x.clone()), 2 * x)
    assert first.backend.calls == ["allgather"]


def test_a_barrier_names_who_is_missing(tmp_path):
    first, _ = make_all(group_config(tmp_path, 2), CUDA)
    with pytest.raises(RankLostError, match=r"rank 0 waited 0.2 s for ranks \[1\]"):
        first.barrier(0.2)


@pytest.mark.parametrize("frames", [[], [b"a"], [b"a", b"b"], [b"b", b"a"], [b"a", b"b", b"a"]])
def test_checksums_depend_on_every_frame_and_their_order(frames):
    checksum = StepChecksum()
    for frame in frames:
        checksum.update(frame)
    assert checksum.value == zlib.crc32(b"".join(frames))


def test_a_checksum_travels_behind_the_tokens():
    packed = with_checksum(torch.tensor([5, -1]), 2**32 - 1)
    assert packed.tolist() == [5, -1, 2**32 - 1]
    require_same(2**32 - 1, 2**32 - 1, rank=1)
    with pytest.raises(RuntimeError, match="rank 1 executed other steps than rank 0"):
        require_same(2**32 - 1, 2**32 - 2, rank=1)
