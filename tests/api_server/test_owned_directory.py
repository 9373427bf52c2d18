"""Private directories: alone with their owner, and removed by the next one when the owner died."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo.api_server.owned_directory import LOCK_FILE, OwnedDirectory

PREFIX = "octavo-ipc-"


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_it_is_private_and_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    with OwnedDirectory.create(tmp_path / "new", PREFIX) as directory:
        assert directory.path.stat().st_mode & 0o777 == 0o700
        (directory.path / "socket").touch()
        assert directory.path.name.startswith(PREFIX)
    assert not names(tmp_path / "new")


def test_a_living_owner_keeps_it_and_a_dead_one_does_not(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from octavo.api_server.owned_directory import OwnedDirectory\n"
        f"directory = OwnedDirectory.create(Path({str(tmp_path)!r}), {PREFIX!r}); print('made', flush=True); input()"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"made\n"
        (living,) = names(tmp_path)
        OwnedDirectory.create(tmp_path, PREFIX).remove()
        assert names(tmp_path) == {living}
    finally:
        owner.kill()
        owner.communicate()
    OwnedDirectory.create(tmp_path, PREFIX).remove()
    assert not names(tmp_path)


def test_what_is_left_of_a_removal_that_was_cut_short_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remains = tmp_path / f"{PREFIX}remains"
    remains.mkdir()
    monkeypatch.chdir(remains)  # a socket's name must be short
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind("engine")
        OwnedDirectory.create(tmp_path, PREFIX).remove()
    assert not names(tmp_path)


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}without-a-lock").mkdir()
    (tmp_path / f"{PREFIX}without-a-lock" / "file").touch()
    (tmp_path / f"{PREFIX}file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_FILE).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    linked_lock = tmp_path / f"{PREFIX}linked-lock"
    linked_lock.mkdir()
    (linked_lock / LOCK_FILE).symlink_to(elsewhere / LOCK_FILE)
    before = names(tmp_path)
    OwnedDirectory.create(tmp_path, PREFIX).remove()
    assert names(tmp_path) == before
    assert (elsewhere / LOCK_FILE).exists()


def test_many_at_once_never_remove_each_other(tmp_path: Path) -> None:
    missing: list[Path] = []

    def live() -> None:
        for _ in range(30):
            with OwnedDirectory.create(tmp_path, PREFIX) as directory:
                if not (directory.path / LOCK_FILE).exists():
                    missing.append(directory.path)

    threads = [threading.Thread(target=live) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missing
    assert not names(tmp_path)


def test_the_lock_is_not_inherited(tmp_path: Path) -> None:
    with OwnedDirectory.create(tmp_path, PREFIX) as directory:
        assert not os.get_inheritable(directory.lock_fd)
