"""The file with the secret that makes a machine part of an instance.

It holds one CURVE secret key, from which everything else is derived. Invariant: a key file that anybody but its owner
may read or write is refused. Rejected: a file for each machine, because then node 0 needs a list of them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from octavo.protocol.config import ParallelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.transport import ClusterKey

MAX_FILE_BYTES = 1024


def write_cluster_key(path: Path) -> None:
    """Write a new key to `path` with mode 0600; raise StartupError when that is not possible or a file is there."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(ClusterKey.create().secret + b"\n")
    except OSError as problem:
        raise StartupError(ExitCode.FAILURE, f"cannot write {path}: {problem.strerror}") from problem


def read_cluster_key(path: Path) -> ClusterKey:
    """Return the key in `path`; raise StartupError when there is none, or when others than its owner may see it."""
    try:
        with path.open("rb") as file:
            others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            secret = file.read(MAX_FILE_BYTES).strip()
    except OSError as problem:
        raise StartupError(ExitCode.USAGE, f"cannot read {path}: {problem.strerror}") from problem
    if others:
        raise StartupError(ExitCode.USAGE, f"{path} is open to others than its owner; run: chmod 600 {path}")
    try:
        return ClusterKey.of_secret(secret)
    except ValueError as problem:
        text = f"{path} is no cluster key; write one with: octavo cluster-key FILE"
        raise StartupError(ExitCode.USAGE, text) from problem


def key_between_nodes(parallel: ParallelConfig) -> ClusterKey | None:
    """Return the key of an instance with several nodes, None for one on a single machine; raises StartupError."""
    if parallel.num_nodes == 1 or parallel.cluster_key_file is None:
        return None
    return read_cluster_key(Path(parallel.cluster_key_file))
