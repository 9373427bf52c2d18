"""The shared-memory group within one process: parts, divergence, patience, and how ranks meet."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.worker.distributed import RankDivergedError, RankLostError
from octavo.worker.distributed_meeting import SOCKET_NAME, meet, share_memory, share_text
from octavo.worker.shared_memory_group import SharedMemoryGroup, memory_num_bytes

SMALL_AREA_BYTES = 128
SHORT_TIMEOUT_S = 0.2


def new_groups(size: int, area_bytes: int = SMALL_AREA_BYTES, timeout_s: float = 60.0) -> list[SharedMemoryGroup]:
    """Return the ends of a group whose memory no directory helped to share."""
    memory_fd = os.memfd_create("test")
    os.ftruncate(memory_fd, memory_num_bytes(size, area_bytes))
    pairs = {rank: socket.socketpair() for rank in range(1, size)}
    groups = [
        SharedMemoryGroup(
            rank,
            size,
            memory_fd,
            {0: pairs[rank][1]} if rank else {other: pair[0] for other, pair in pairs.items()},
            area_bytes,
            timeout_s,
        )
        for rank in range(size)
    ]
    os.close(memory_fd)
    return groups


def run_all(groups, work):
    """Run `work(group)` on a thread each; return results, or the exceptions."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(work, group) for group in groups]
    return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_what_is_larger_than_an_area_goes_in_parts(num_rows, dtype):
    size, widths = 3, [5, 70, 1]  # 70 numbers are more than an area has
    rows = [(100 * torch.randn(num_rows, 9)).to(dtype) for _ in range(size)]
    columns = [(100 * torch.randn(num_rows, width)).to(dtype) for width in widths]

    def work(group):
        total = group.all_reduce(rows[group.rank].clone())
        gathered = group.gather_columns(columns[group.rank], widths)
        own = rows[0].clone() if group.rank == 0 else torch.zeros_like(rows[0])
        return total, gathered, group.broadcast(own)

    expected = rows[0] + rows[1] + rows[2]
    for rank, (total, gathered, received) in enumerate(run_all(new_groups(size), work)):
        assert torch.equal(total, expected)
        assert torch.equal(received, rows[0])
        assert gathered is None if rank else torch.equal(gathered, torch.cat(columns, dim=1))


def test_tensors_that_are_not_contiguous():
    x = torch.arange(12.0).view(3, 4)
    results = run_all(new_groups(2), lambda group: (group.all_reduce(x.t().clone().t()), group.broadcast(x.t())))
    for total, received in results:
        assert torch.equal(total, 2 * x)
        assert torch.equal(received, x.t())


def test_nothing_at_all_can_be_sent():
    results = run_all(new_groups(2), lambda group: group.broadcast(torch.zeros(0, dtype=torch.int64)))
    assert [result.tolist() for result in results] == [[], []]


DIVERGED = {
    "shape": (
        lambda group: group.all_reduce(torch.ones(8 + group.rank)),
        "collective 1: rank 0 does ALL_REDUCE of 8 float32, rank 1 does ALL_REDUCE of 9 float32",
    ),
    "dtype": (
        lambda group: group.all_reduce(torch.ones(8, dtype=(torch.float32, torch.bfloat16)[group.rank])),
        "collective 1: rank 0 does ALL_REDUCE of 8 float32, rank 1 does ALL_REDUCE of 8 bfloat16",
    ),
    "operation": (
        lambda group: group.all_reduce(torch.ones(8)) if group.rank else group.gather_columns(torch.ones(2, 4), [4, 4]),
        "collective 1: rank 0 does GATHER of 2 float32, rank 1 does ALL_REDUCE of 8 float32",
    ),
}


@pytest.mark.parametrize("name", DIVERGED)
def test_ranks_that_do_not_do_the_same_are_told_so(name):
    work, words = DIVERGED[name]
    problem, _ = run_all(new_groups(2, timeout_s=SHORT_TIMEOUT_S), work)
    assert isinstance(problem, RankDivergedError)
    assert str(problem) == words


@pytest.mark.parametrize(
    "wait",
    [
        lambda group: group.all_reduce(torch.ones(8)),
        lambda group: group.broadcast(torch.ones(8)),
        lambda group: group.barrier(SHORT_TIMEOUT_S),
    ],
)
def test_nobody_waits_for_ever(wait):
    _, group = new_groups(2, timeout_s=SHORT_TIMEOUT_S)
    with pytest.raises(RankLostError, match=r"rank 1 waited 0\.2 s for rank 0"):
        wait(group)


def test_a_rank_may_not_run_ahead_of_the_readers_of_its_area():
    group, _ = new_groups(2, timeout_s=SHORT_TIMEOUT_S)
    group.broadcast(torch.ones(4))  # nobody needs to be there for the first one
    with pytest.raises(RankLostError):
        group.broadcast(torch.ones(4))


def test_a_lost_peer_is_noticed_at_once():
    groups = new_groups(2)
    for _, connection in groups[0]._peers.values():
        connection.close()
    with pytest.raises(RankLostError, match="rank 0 is gone"):
        groups[1].all_reduce(torch.ones(8))


def test_what_a_rank_did_before_it_left_still_counts():
    groups = new_groups(2)
    groups[0].broadcast(torch.full((4,), 7.0))
    for _, connection in groups[0]._peers.values():
        connection.close()
    assert groups[1].broadcast(torch.zeros(4)).tolist() == [7.0] * 4


def meet_all(directory, size: int, timeout_s: float = 60.0, absent: tuple[int, ...] = ()):
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = meet(str(directory), rank, size, timeout_s)
        except RuntimeError as problem:
            results[rank] = problem

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_meet_and_leave_no_file(tmp_path):
    (tmp_path / SOCKET_NAME).write_text("of a start that was cut short")
    for _ in range(2):
        results = meet_all(tmp_path, 3)
        assert {rank: sorted(peers) for rank, peers in results.items()} == {0: [1, 2], 1: [0], 2: [0]}
        assert not list(tmp_path.iterdir())
        texts = [share_text(results[rank], rank, f"of rank {rank}") for rank in range(3)]
        assert texts == ["of rank 0"] * 3


def test_ranks_share_memory_that_has_no_name(tmp_path):
    results = meet_all(tmp_path, 2)
    descriptors = [share_memory(results[rank], rank, 4096) for rank in range(2)]
    os.pwrite(descriptors[0], b"hello", 100)
    assert os.pread(descriptors[1], 5, 100) == b"hello"
    assert os.fstat(descriptors[1]).st_size == 4096
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("absent", "words"), [(2, "ranks [2] did not come"), (0, "rank 1 waited for rank 0 in vain")])
def test_a_rank_that_does_not_come_is_named(tmp_path, absent, words):
    results = meet_all(tmp_path, 3, SHORT_TIMEOUT_S, (absent,))
    assert any(isinstance(problem, RankLostError) and words in str(problem) for problem in results.values())
