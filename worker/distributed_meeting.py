"""How the ranks on one machine find each other: over a Unix socket in the private directory.

Rank 0 listens, the others connect and say who they are. The directory's mode (0700) is the access control. The socket's
file is gone once all are there, so that ranks that are started anew in the same directory meet only each other.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from socket import AF_UNIX, recv_fds, send_fds, socket

from octavo.worker.distributed import RankDivergedError, RankLostError

SOCKET_NAME = "ranks"
RANK_BYTES = 2
RETRY_S = 0.01
MEMORY_MESSAGE = b"memory"


def _receive_rank(connection: socket, size: int, known: dict[int, socket]) -> int:
    rank = int.from_bytes(connection.recv(RANK_BYTES), "little")
    if not 0 < rank < size or rank in known:
        raise RankDivergedError(f"rank {rank} of {size} came to the meeting of the ranks, or came twice")
    return rank


def _welcome(path: Path, size: int, deadline_s: float) -> dict[int, socket]:
    peers: dict[int, socket] = {}
    path.unlink(missing_ok=True)
    with socket(AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(size)
        while len(peers) < size - 1:
            ready, _, _ = select.select([listener], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                missing = sorted(set(range(1, size)) - peers.keys())
                raise RankLostError(f"ranks {missing} did not come to the meeting of the ranks")
            connection, _ = listener.accept()
            peers[_receive_rank(connection, size, peers)] = connection
    path.unlink()
    return peers


def _join(path: Path, rank: int, deadline_s: float) -> socket:
    while True:
        connection = socket(AF_UNIX)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as problem:
            connection.close()
            if time.monotonic() > deadline_s:
                raise RankLostError(f"rank {rank} waited for rank 0 in vain") from problem
            time.sleep(RETRY_S)
            continue
        connection.sendall(rank.to_bytes(RANK_BYTES, "little"))
        return connection


def meet(directory: str, rank: int, size: int, timeout_s: float) -> dict[int, socket]:
    """Return the connections to the other ranks, by rank: rank 0 has one to each, the others one to rank 0.

    Raises RankLostError when a rank does not come within `timeout_s`.
    """
    path, deadline_s = Path(directory) / SOCKET_NAME, time.monotonic() + timeout_s
    return _welcome(path, size, deadline_s) if rank == 0 else {0: _join(path, rank, deadline_s)}


def share_text(peers: dict[int, socket], rank: int, text: str) -> str:
    """Return rank 0's `text`, which must not be empty; on the others, whatever they pass is ignored."""
    if rank == 0:
        for connection in peers.values():
            connection.sendall(text.encode())
        return text
    received = peers[0].recv(1024)
    if not received:
        raise RankLostError("rank 0 is gone")
    return received.decode()


def share_memory(peers: dict[int, socket], rank: int, num_bytes: int) -> int:
    """Return a descriptor of `num_bytes` zeros that all ranks share; the caller closes it.

    The memory has no name anywhere, so that nothing of it is left when the ranks have ended.
    """
    if rank == 0:
        memory_fd = os.memfd_create("octavo-ranks")
        os.ftruncate(memory_fd, num_bytes)
        for connection in peers.values():
            send_fds(connection, [MEMORY_MESSAGE], [memory_fd])
        return memory_fd
    message, file_descriptors, _, _ = recv_fds(peers[0], len(MEMORY_MESSAGE), 1)
    if message != MEMORY_MESSAGE or len(file_descriptors) != 1:
        raise RankLostError("rank 0 is gone")
    return file_descriptors[0]
