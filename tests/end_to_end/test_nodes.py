"""Two nodes of one instance, with the oracle as their workers: on loopback, so that this runs everywhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import Nodes, end_of, wait_serving
from server_process import wait_until

from octavo.protocol.cluster_key import write_cluster_key
from octavo.protocol.lifecycle import ExitCode

pytestmark = pytest.mark.model

SHORT_S = 3  # a node that does not come is waited for only so long


@pytest.fixture
def nodes(smollm2_gguf: Path, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(smollm2_gguf, tmp_path, "127.0.0.1")
    yield nodes
    nodes.destroy()


def test_two_nodes_say_what_they_are_and_end_together(nodes: Nodes) -> None:
    first, second = nodes.start_all()
    first.process_called("oracle_worker 0")
    first.process_called("engine_core")
    second.process_called("oracle_worker 1")
    assert len(second.living()) == 2  # the supervisor and its worker
    assert f"  2 met at {nodes.place}" in first.stderr
    assert "node 1 of 2; requests go to node 0, 127.0.0.1" in second.stderr
    for node in (second, first):  # as a cluster stops them: all at about the same time
        node.send(signal.SIGTERM)
    assert (end_of(first), end_of(second)) == ((ExitCode.OK, []), (ExitCode.OK, []))


def test_a_node_that_is_asked_twice_does_not_wait_for_node_0(nodes: Nodes) -> None:
    first, second = nodes.start_all()
    second.send(signal.SIGTERM)
    wait_until(lambda: "node 0 has 30 s to finish" in second.stderr, "the answer to the signal")
    assert nodes.complete(first, "x", 5)
    second.send(signal.SIGINT)
    assert end_of(second) == (ExitCode.OK, [])
    status, (line,) = end_of(first)
    assert status == ExitCode.NODE_LOST
    assert "node 1 is gone" in line


def test_node_0_names_the_node_that_did_not_come(nodes: Nodes) -> None:
    status, (line,) = end_of(nodes.start(0, timeout_s=SHORT_S))
    assert status == ExitCode.NODE_LOST
    assert f"no sign of node 1 (worker 1) within {SHORT_S} s" in line


def test_another_node_names_the_place_that_it_cannot_reach(nodes: Nodes) -> None:
    status, (line,) = end_of(nodes.start(1, timeout_s=SHORT_S))
    assert status == ExitCode.NODE_LOST
    assert f"cannot reach node 0 at {nodes.place} within {SHORT_S} s" in line
    assert "--master-addr" in line


def test_a_node_with_another_key_is_told_so_and_does_not_disturb(nodes: Nodes, tmp_path: Path) -> None:
    other_key = tmp_path / "other.key"
    write_cluster_key(other_key)
    first = nodes.start(0)
    status, (line,) = end_of(nodes.start(1, "--cluster-key-file", str(other_key)))
    assert status == ExitCode.USAGE
    assert f"what listens at {nodes.place} does not have this node's key" in line
    assert "--cluster-key-file" in line
    wait_serving(nodes.start(1))
    wait_serving(first)
    status, (line,) = end_of(nodes.start(1, "--cluster-key-file", str(other_key)))
    assert status == ExitCode.USAGE
    assert nodes.complete(first, "x", 5)


def test_a_second_node_with_the_same_rank_is_turned_away(nodes: Nodes) -> None:
    first, _ = nodes.start_all()
    twin = nodes.start(1, timeout_s=SHORT_S)
    status, (line,) = end_of(twin)
    assert status == ExitCode.NODE_LOST
    assert "does another node run with --node-rank 1?" in line
    assert nodes.complete(first, "x", 5)


def test_nodes_that_were_started_differently_name_the_difference(nodes: Nodes) -> None:
    for node in [nodes.start(0), nodes.start(1, "--block-size", "32")]:
        status, (line,) = end_of(node)
        assert status == ExitCode.USAGE
        assert "block_size is 32 on node 1 and 16 on node 0" in line


@pytest.mark.parametrize("victim", ["supervisor", "oracle_worker 1"])
def test_node_0_ends_when_another_node_does(nodes: Nodes, victim: str) -> None:
    first, second = nodes.start_all()
    second.process_called(victim).kill()
    status, (line,) = end_of(first)
    assert status == ExitCode.NODE_LOST
    assert "node 1 is gone: its worker 1 is not connected any more" in line
    second.wait_until_all_have_ended()  # its directory, without sockets, is left to the next start


@pytest.mark.parametrize("victim", ["supervisor", "engine_core", "oracle_worker 0"])
def test_another_node_ends_when_node_0_does(nodes: Nodes, victim: str) -> None:
    first, second = nodes.start_all()
    first.process_called(victim).kill()
    status, (line,) = end_of(second)
    assert status == ExitCode.NODE_LOST
    assert f"node 0 at {nodes.place} is gone" in line
    status = first.wait()
    first.assert_nothing_is_left()
    if victim != "supervisor":
        assert status == ExitCode.PROCESS_DIED
        assert f"the {victim.replace('oracle_', '').replace('_', ' ')} process" in first.stderr


def test_an_address_of_another_machine_and_a_port_that_is_taken_are_named(nodes: Nodes) -> None:
    nodes.start(0)
    wait_until(lambda: "  port " in nodes.started[0].stderr, "the first start")
    second = nodes.start(0)
    status, (line,) = end_of(second)
    assert status == ExitCode.PORT_TAKEN
    assert f"cannot listen at --master-addr 127.0.0.1 --master-port {nodes.port}: Address already in use" in line
    nodes.address = "192.0.2.1"  # for documentation: nobody has it
    status, (line,) = end_of(nodes.start(0))
    assert status == ExitCode.USAGE
    assert "cannot listen at --master-addr 192.0.2.1" in line
