"""Fresh private directories that cannot outlive their owner for long.

A lock file inside is held for the owner's life. Invariant: a directory of our name without a held lock belongs to
nobody, so the next owner in the same place removes it. Rejected: process ids in the name, because they are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK_FILE = "lock"
UNFINISHED_PREFIX = ".new-"


class OwnedDirectory:
    """A directory with mode 0700, from `create` until `remove`, or until its owner's process ends."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    def __enter__(self) -> OwnedDirectory:
        return self

    def __exit__(self, *problem: object) -> None:
        self.remove()

    @classmethod
    def create(cls, parent: Path, prefix: str) -> OwnedDirectory:
        """Make `parent`/`prefix`* and remove those that dead owners left there; raises OSError."""
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_stale(parent, prefix)
        # It gets its name only once the lock is held: otherwise another start could take it for a dead one.
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED_PREFIX + prefix, dir=parent))
        try:
            lock_fd = os.open(unfinished / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = parent / unfinished.name.removeprefix(UNFINISHED_PREFIX)
            unfinished.rename(path)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return cls(path, lock_fd)

    def remove(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock_fd)


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove the directories `parent`/`prefix`* that are ours and that no living process owns."""
    with os.scandir(parent) as entries:
        paths = [Path(entry.path) for entry in entries if entry.name.startswith(prefix) and _is_our_directory(entry)]
    for path in paths:
        with contextlib.suppress(OSError):  # it is in use, or another start removes it at this moment
            try:
                lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                _remove_remains(path)
                continue
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock_fd)


def _remove_remains(path: Path) -> None:
    """Remove what is left when somebody was killed while removing it: sockets, no lock. With other files it stays."""
    for entry in path.iterdir():
        if entry.is_socket():
            entry.unlink()
    path.rmdir()


def _is_our_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False
