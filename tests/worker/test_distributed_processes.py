"""Ranks as processes: what they tell each other arrives bit for bit, and a rank that fails ends the others."""

from __future__ import annotations

import socket
import subprocess

import pytest
from rank_processes import PATIENCE_S, TESTS, outputs_of, running_ranks

SCRIPT = TESTS / "rank_script.py"
SHARED_MEMORY = "shared memory"


def free_ports() -> int:
    """Return a port of which the next one is free as well, as far as one can know."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def errors_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all; return the last line of what each complained."""
    return [process.communicate(timeout=PATIENCE_S)[1].strip().split("\n")[-1] for process in processes]


@pytest.mark.parametrize(
    ("transport", "size"),
    [(SHARED_MEMORY, 3), ("gloo", 2), ("nodes", 2)],
)
def test_collectives_of_every_size_and_kind(tmp_path, transport, size):
    port = [str(free_ports())] if transport == "nodes" else []
    with running_ranks(SCRIPT, size, "ragged", transport, str(tmp_path), *port) as processes:
        outputs_of(processes)
    left = [path.name for path in tmp_path.iterdir()]
    assert all(name.startswith("ranks-") for name in left), "only torch's store, which its user removes"
    assert not left or transport == "gloo"


@pytest.mark.parametrize("killed_rank", [0, 1])
def test_a_killed_rank_ends_the_others(tmp_path, killed_rank):
    with running_ranks(SCRIPT, 3, "endless", SHARED_MEMORY, str(tmp_path)) as processes:
        for process in processes:
            assert process.stdout.readline() == "started\n"
        processes.pop(killed_rank).kill()
        for error in errors_of(processes):
            assert "RankLostError: rank" in error


@pytest.mark.parametrize("killed_rank", [0, 1])
def test_a_killed_rank_ends_the_others_across_nodes(tmp_path, killed_rank):
    with running_ranks(SCRIPT, 2, "endless", "nodes", str(tmp_path), str(free_ports())) as processes:
        for process in processes:
            assert process.stdout.readline() == "started\n"
        processes.pop(killed_rank).kill()
        (error,) = errors_of(processes)
        assert "RuntimeError" in error or "Error: rank" in error


@pytest.mark.parametrize("transport", [SHARED_MEMORY, "gloo"])
def test_another_step_is_found_in_that_step(tmp_path, transport):
    with running_ranks(SCRIPT, 3, "checksum", transport, str(tmp_path)) as processes:
        results = [process.communicate(timeout=PATIENCE_S) for process in processes]
    outputs = [output.split() for output, _ in results]
    assert outputs[2] == ["0", "1"]
    assert "RankDivergedError: rank 2 executed other steps than rank 0" in results[2][1]
    assert outputs[0] == outputs[1] == ["0", "1", "2"], "they wait for the next one in vain"
    assert all(process.returncode != 0 for process in processes)
