"""The engine core and workers of several nodes over encrypted sockets: how they meet, and what a loss looks like."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from scheduler_harness import make_config

from octavo.engine_core.executor import WorkerExecutor, WorkerLostError
from octavo.protocol.agreement import Agreement, agreement_of
from octavo.protocol.codec import decode_engine_hello, encode
from octavo.protocol.config import EngineConfig, ParallelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.transport import ClusterKey, Connection, Listener
from octavo.protocol.worker_messages import EngineHello, WorkerHello, WorkerReady

KEY = ClusterKey.create()
PATIENCE_S = 10


class Cluster:
    """Two nodes of two workers each, which do only what the test tells them."""

    def __init__(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        config = make_config(str(directory))
        parallel = ParallelConfig(
            tensor_parallel_size=4, num_nodes=2, master_address="127.0.0.1", cluster_key_file="-", node_timeout_s=1
        )
        model = msgspec.structs.replace(config.model, path=str(directory))
        self.config: EngineConfig = msgspec.structs.replace(config, model=model, parallel=parallel)
        self.listener = Listener("tcp://127.0.0.1:*", KEY)
        self.executor = WorkerExecutor(self.listener, num_workers=4, num_nodes=2)
        self.place = self.listener.socket.last_endpoint.decode()
        self.workers: list[Connection] = []

    def connect(self, *ranks: int) -> None:
        self.workers += [Connection(self.place, f"worker-{rank}", KEY) for rank in ranks]

    def say_hello(self, rank: int, agreement: Agreement | None = None) -> None:
        self.workers[rank].send(encode(WorkerHello(rank, agreement or agreement_of(self.config))))

    def answer_to(self, rank: int) -> EngineHello:
        frame = self.workers[rank].receive(PATIENCE_S)
        assert frame is not None
        return decode_engine_hello(frame)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        if not self.listener.socket.closed:
            self.listener.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_nobody_goes_on_before_all_have_come(cluster: Cluster) -> None:
    cluster.connect(0, 1, 2, 3)
    meeting = threading.Thread(target=cluster.executor.meet_all_nodes, args=(cluster.config,))
    meeting.start()
    for rank in range(3):
        cluster.say_hello(rank)
    assert cluster.workers[0].receive(0.2) is None
    cluster.say_hello(3)
    meeting.join(PATIENCE_S)
    assert [cluster.answer_to(rank) for rank in range(4)] == [EngineHello()] * 4


def test_who_is_missing_is_named_on_every_side(cluster: Cluster) -> None:
    cluster.connect(0, 1, 2)
    for rank in range(3):
        cluster.say_hello(rank)
    with pytest.raises(StartupError, match=r"no sign of node 1 \(worker 3\) within 1 s") as caught:
        cluster.executor.meet_all_nodes(cluster.config)
    assert caught.value.exit_code is ExitCode.NODE_LOST
    assert cluster.answer_to(2) == EngineHello(caught.value.message, ExitCode.NODE_LOST)


def test_a_difference_is_named_on_every_side(cluster: Cluster) -> None:
    cluster.connect(0, 1, 2)
    cluster.say_hello(0)
    cluster.say_hello(2, {**agreement_of(cluster.config), "block_size": "5"})
    with pytest.raises(StartupError, match="block_size is 5 on node 1 and 4 on node 0") as caught:
        cluster.executor.meet_all_nodes(cluster.config)
    assert caught.value.exit_code is ExitCode.USAGE
    assert cluster.answer_to(2) == EngineHello(caught.value.message, ExitCode.USAGE)


def test_a_worker_that_goes_while_others_load_is_noticed(cluster: Cluster) -> None:
    cluster.connect(0, 1, 2, 3)
    for rank in range(4):
        cluster.say_hello(rank)
    cluster.executor.meet_all_nodes(cluster.config)
    cluster.workers[0].send(encode(WorkerReady(0, 9)))
    cluster.workers.pop(3).close()
    with pytest.raises(WorkerLostError, match="node 1 is gone: its worker 3 is not connected any more") as caught:
        cluster.executor.wait_until_ready()
    assert caught.value.exit_code is ExitCode.NODE_LOST


def test_a_worker_of_node_0_that_goes_is_a_death_on_this_node(cluster: Cluster) -> None:
    cluster.connect(0, 1, 2, 3)
    for rank in range(4):
        cluster.say_hello(rank)
    cluster.executor.meet_all_nodes(cluster.config)
    cluster.workers.pop(1).close()
    with pytest.raises(WorkerLostError, match="worker 1 is gone") as caught:
        cluster.executor.wait_until_ready()
    assert caught.value.exit_code is ExitCode.PROCESS_DIED


def test_with_one_node_nothing_is_sent_between_steps(tmp_path: Path) -> None:
    listener = Listener(f"ipc://{tmp_path}/worker")
    executor = WorkerExecutor(listener, num_workers=2)
    executor.check()  # nobody is connected, and that is not looked at
    assert executor.check_interval_s is None
    listener.close()
