"""The engine core and an oracle worker as real processes, started as the supervisor starts them."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_harness import ApiServer
from scheduler_harness import expected, make_config

from octavo.protocol.lifecycle import ExitCode, Launch, Progress, Ready, decode_status, write_launch

TESTS = Path(__file__).parents[1]
PATIENCE_S = 30


class Child:
    """A process of the tree with both ends of its pipes."""

    def __init__(self, module, config, index=0):
        read_fd, write_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            pass_fds=[write_fd],
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        os.close(write_fd)
        self.statuses = os.fdopen(read_fd, "rb")
        launch = Launch(config=config, parent_pid=os.getpid(), status_fd=write_fd, index=index)
        write_launch(self.process.stdin.fileno(), launch)

    def next_status(self):
        return decode_status(self.statuses.readline())

    def hang_up(self):
        """Close the control pipe, as the death of the supervisor does; return the exit code."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def children():
    started = []

    def start(module, config, index=0):
        started.append(Child(module, config, index))
        return started[-1]

    yield start
    for child in started:
        child.process.kill()
        child.process.wait(PATIENCE_S)
        child.statuses.close()


def test_a_request_through_real_processes(children, tmp_path):
    sockets = tmp_path / "ipc"
    sockets.mkdir(mode=0o700)
    config = make_config(str(sockets), num_device_blocks=1234)
    engine_core = children("octavo.engine_core", config)
    worker = children("oracle_worker", config)
    assert isinstance(worker.next_status(), Ready)
    progress = engine_core.next_status()
    assert isinstance(progress, Progress)
    assert (progress.phase, progress.detail) == ("kv_blocks", "1,234 blocks of 4 tokens = 4,936 tokens")
    assert isinstance(engine_core.next_status(), Ready)

    api_server = ApiServer(config)
    api_server.hello()
    commands = [api_server.add(f"r{n}", [n, 2, 3], max_tokens=60, temperature=1.0, seed=n) for n in range(40)]
    for command in commands:
        assert api_server.wait_for(command.request_id) == expected(config, command)
    api_server.close()

    for child in (engine_core, worker):
        assert child.hang_up() == ExitCode.FAILURE
    assert not sockets.exists()
