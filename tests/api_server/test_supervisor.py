"""The supervisor over fake processes: every way to start, to fail and to end, and that nothing is ever left."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ProcessTree, wait_until

from octavo.api_server.child_process import ChildProcess, ProcessSpec
from octavo.protocol.lifecycle import ExitCode, StartupError

INSTANCE = str(Path(__file__).with_name("fake_instance.py"))
API = "port ready drains:1"


class FakeInstance(ProcessTree):
    def __init__(self, api: str = API, engine: str = "ready", *workers: str, place: Path | None = None) -> None:
        environment = {"XDG_RUNTIME_DIR": str(place)} if place else {}
        super().__init__([sys.executable, INSTANCE, api, engine, *(workers or ("ready",))], environment)

    def wait_ready(self) -> None:
        wait_until(lambda: "  ready " in self.stderr, f"readiness; {self.stderr}")


@pytest.fixture
def started() -> Iterator[list[FakeInstance]]:
    """Instances that the test started; nothing of them survives it."""
    instances: list[FakeInstance] = []
    yield instances
    for instance in instances:
        instance.destroy()


def end(instance: FakeInstance) -> int:
    status = instance.wait()
    instance.assert_nothing_is_left()
    return status


def error_lines(instance: FakeInstance) -> list[str]:
    return [line for line in instance.stderr.splitlines() if line.startswith("octavo: error: ")]


def test_sigterm_drains_then_stops_the_rest(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance())
    instance.wait_ready()
    instance.send(signal.SIGTERM)
    assert end(instance) == ExitCode.OK
    assert instance.stderr.count("DRAIN to api-server") == 1
    assert "DRAIN to worker" not in instance.stderr
    assert "DRAIN to engine-core" not in instance.stderr
    assert not error_lines(instance)


def test_sigint_leaves_no_time_to_finish(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance("port ready drains:2"))
    instance.wait_ready()
    instance.send(signal.SIGINT)
    assert end(instance) == ExitCode.OK
    assert instance.stderr.count("DRAIN to api-server") == 2


def test_second_sigterm_ends_the_drain(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance("port ready drains:2"))
    instance.wait_ready()
    instance.send(signal.SIGTERM)
    wait_until(lambda: "DRAIN to api-server" in instance.stderr, "the drain")
    instance.send(signal.SIGTERM)
    assert end(instance) == ExitCode.OK


def test_third_signal_does_not_wait_for_the_api_server(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance("port ready drains:99"))
    instance.wait_ready()
    for count in range(1, 4):
        instance.send(signal.SIGTERM)
        if count < 3:
            wait_until(lambda: instance.stderr.count("DRAIN to api-server") == count, f"drain {count}")  # noqa: B023
    assert end(instance) == ExitCode.OK


def test_a_drain_that_never_ends_is_cut_off(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance("port ready drains:99"))
    instance.wait_ready()
    instance.send(signal.SIGTERM)
    assert end(instance) == ExitCode.OK


def test_workers_get_their_launch_only_when_the_port_is_bound(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance("fail:PORT_TAKEN", "ready", "suicide"))
    assert end(instance) == ExitCode.PORT_TAKEN
    assert error_lines(instance) == ["octavo: error: told to fail with PORT_TAKEN"]


@pytest.mark.parametrize("code", [ExitCode.OUT_OF_MEMORY, ExitCode.UNSUPPORTED_MODEL, ExitCode.BAD_WEIGHTS])
def test_a_failed_start_gives_one_line_and_its_exit_code(started: list[FakeInstance], code: ExitCode) -> None:
    started.append(instance := FakeInstance(API, "ready", f"fail:{code.name}"))
    assert end(instance) == code
    assert error_lines(instance) == [f"octavo: error: told to fail with {code.name}"]


@pytest.mark.parametrize(
    ("acts", "how"),
    [
        ("exit:0", "exit code 0"),
        ("exit:7", "exit code 7"),
        ("suicide", "killed by SIGKILL"),
        ("ready exit:0", "code 0"),
    ],
)
@pytest.mark.parametrize("victim", ["api server", "engine core", "worker"])
def test_a_process_that_ends_by_itself_takes_all_down(
    started: list[FakeInstance], victim: str, acts: str, how: str
) -> None:
    api = f"port {acts}" if victim == "api server" else API
    engine = acts if victim == "engine core" else "ready"
    started.append(instance := FakeInstance(api, engine, acts if victim == "worker" else "ready"))
    assert end(instance) == ExitCode.PROCESS_DIED
    (line,) = error_lines(instance)
    assert victim in line
    assert how in line


def test_a_bug_in_a_process_is_reported_as_such(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance(API, "crash"))
    assert end(instance) == ExitCode.FAILURE
    assert error_lines(instance) == ["octavo: error: engine-core: RuntimeError: told to crash"]


def test_the_death_of_a_process_is_the_cause_of_what_others_then_report(
    started: list[FakeInstance], tmp_path: Path
) -> None:
    engine = f"ready until:{tmp_path}/now fail:FAILURE"
    started.append(instance := FakeInstance("port ready", engine, "ready", "ready"))
    instance.wait_ready()
    instance.send(signal.SIGSTOP)  # so that it learns of both at once
    instance.process_called("worker 1").kill()
    (tmp_path / "now").touch()
    wait_until(lambda: len(instance.living()) == 3, "the end of the engine core")
    instance.send(signal.SIGCONT)
    assert end(instance) == ExitCode.PROCESS_DIED
    assert "worker 1 process" in error_lines(instance)[0]


def test_what_is_no_status_is_ignored_and_many_statuses_arrive(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance(API, "garbage ready", "lines:3000 garbage ready"))
    instance.wait_ready()
    instance.send(signal.SIGINT)
    assert end(instance) == ExitCode.OK
    assert instance.stderr.count("  phase ") == 3000


def test_a_process_that_closes_its_status_pipe_does_not_make_the_supervisor_spin(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance(API, "ready hush"))
    instance.wait_ready()
    before_s = sum(instance.living()[0].cpu_times()[:2])
    time.sleep(0.5)
    assert sum(instance.living()[0].cpu_times()[:2]) - before_s < 0.2
    instance.send(signal.SIGINT)
    assert end(instance) == ExitCode.OK


@pytest.mark.parametrize("acts", ["stop", "ready stop", "import"])
def test_a_stuck_process_is_killed(started: list[FakeInstance], acts: str) -> None:
    started.append(instance := FakeInstance("port ready drains:1", "ready", acts))
    wait_until(lambda: "  port " in instance.stderr, "the port")
    instance.send(signal.SIGINT)
    assert end(instance) == ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_any_moment_of_the_start_ends_cleanly(started: list[FakeInstance], number: signal.Signals) -> None:
    for seed in range(10):
        started.append(instance := FakeInstance(API, "sleep:0.1 ready", "sleep:0.2 ready"))
        time.sleep(random.Random(seed).uniform(0.0, 0.6))
        instance.send(number)
        status = end(instance)
        assert status in (ExitCode.OK, -number), instance.stderr  # until Python runs, the signal's default acts
        assert not error_lines(instance)
        started.pop().destroy()


def test_ctrl_c_in_the_terminal_reaches_all_and_disturbs_none(started: list[FakeInstance]) -> None:
    started.append(instance := FakeInstance("port ready drains:2", "ready", "import"))
    wait_until(lambda: "  port " in instance.stderr, "the port")
    for process in instance.living()[::-1]:  # the terminal signals the whole group
        process.send_signal(signal.SIGINT)
    assert end(instance) == ExitCode.OK
    assert "Traceback" not in instance.stderr
    assert "KeyboardInterrupt" not in instance.stderr


@pytest.mark.parametrize("worker", ["ready", "ready stop", "import"])
def test_nothing_outlives_a_killed_supervisor(started: list[FakeInstance], worker: str) -> None:
    started.append(instance := FakeInstance("port ready", "ready", worker))
    wait_until(lambda: "  port " in instance.stderr and len(instance.living()) == 4, "all processes")
    instance.process.kill()
    assert end(instance) == -signal.SIGKILL


def test_the_next_start_removes_what_a_killed_group_left(started: list[FakeInstance]) -> None:
    started.append(first := FakeInstance())
    first.wait_ready()
    for process in first.living():
        process.suspend()  # so that nobody sees the others end, and cleans up
    for process in first.living():
        process.kill()
    wait_until(lambda: not first.living(), "the end")
    (left,) = first.runtime_directory.iterdir()
    for count in (1, 2):
        started.append(instance := FakeInstance(place=first.runtime_directory))
        instance.wait_ready()
        assert not left.exists()
        assert len(list(first.runtime_directory.iterdir())) == count  # the living ones are left alone
    for instance in started[1:]:
        instance.send(signal.SIGTERM)
        assert end(instance) == ExitCode.OK
    first.assert_nothing_is_left()


def test_a_process_that_cannot_be_started_is_a_problem_with_a_name_and_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StartupError, match="cannot start the worker process") as caught:
        ChildProcess(ProcessSpec("worker", ("/nowhere/python",)))
    assert caught.value.exit_code is ExitCode.FAILURE
    assert len(list(Path("/proc/self/fd").iterdir())) == before
