"""The parent of all processes: starts them, watches them, drains them, and takes everything down with it.

Order of the start: all processes at once, because most of the time goes into imports; but workers get their Launch,
and so load weights, only when an API server has bound the port. Invariant: `run` returns only when no child is left.
The urgency of a stop only grows: a first SIGTERM drains, a SIGINT or a second SIGTERM lets nobody finish, one more
kills. Rejected: asyncio, because there is nothing here but one wait on a few descriptors.

With several nodes each has a supervisor; that of another node than 0 has only workers. Nodes are often stopped
together, so there a drain means to go on until node 0 has drained, which is seen by its end.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum

import setproctitle

from octavo.api_server.child_process import ChildProcess, ProcessSpec, module_command, stop_all
from octavo.api_server.startup_log import StartupLog
from octavo.api_server.stop_signals import SignalInbox
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import PORT_PHASE, AnyStatus, Command, ExitCode, Failed, Progress, Ready, StartupError

STOP_PATIENCE_S = 1.0
DRAIN_MARGIN_S = 5.0

API_SERVER = "api server"
ENGINE_CORE = "engine core"
WORKER = "worker"


class Urgency(IntEnum):
    """How soon the operator wants the end."""

    NONE = 0
    DRAIN = 1
    FINISH = 2
    KILL = 3


def process_specs(config: EngineConfig, worker_environment: Mapping[str, str]) -> tuple[ProcessSpec, ...]:
    """The processes of this node, in the order in which they start."""
    parallel = config.parallel
    workers = tuple(
        ProcessSpec(
            WORKER,
            module_command(config.worker_module),
            rank,
            parallel.tensor_parallel_size,
            dies_with_parent=True,
            environment=dict(worker_environment),
        )
        for rank in parallel.local_ranks
    )
    if parallel.node_rank > 0:
        return workers
    return (
        ProcessSpec(API_SERVER, module_command("octavo.api_server")),
        *workers,
        ProcessSpec(ENGINE_CORE, module_command("octavo.engine_core")),
    )


class Supervisor:
    """One instance, from its first process to its last."""

    def __init__(self, config: EngineConfig, specs: Sequence[ProcessSpec], signals: SignalInbox, log: StartupLog):
        self.config = config
        self.specs = specs
        self.signals = signals
        self.log = log
        self.children: list[ChildProcess] = []
        self.selector = selectors.DefaultSelector()
        self.urgency = Urgency.NONE
        self.url = ""
        self.is_serving = False
        self.drain_deadline_s: float | None = None

    def run(self) -> ExitCode:
        """Serve until the operator stops the server; return OK then.

        Raises StartupError with the reason when the instance cannot start or loses a process. Either way no child
        is left.
        """
        setproctitle.setproctitle("octavo: supervisor")
        self.selector.register(self.signals, selectors.EVENT_READ)
        try:
            self._start_processes()
            while not self._is_over():
                self._wait()
                self._read_signals()
                self._read_children()
            return ExitCode.OK
        finally:
            stop_all(self.children, STOP_PATIENCE_S)
            self.selector.close()

    @property
    def _is_node_0(self) -> bool:
        return self.config.parallel.node_rank == 0

    def _start_processes(self) -> None:
        for spec in self.specs:
            child = ChildProcess(spec)
            self.children.append(child)
            self.selector.register(child.status_fd, selectors.EVENT_READ, child)
            if spec.title != WORKER or not self._is_node_0:
                child.launch(self.config)

    def _wait(self) -> None:
        timeout_s = None if self.drain_deadline_s is None else max(0.0, self.drain_deadline_s - time.monotonic())
        self.selector.select(timeout_s)

    def _is_over(self) -> bool:
        if self.urgency is Urgency.NONE:
            return False
        if not self.is_serving or self.urgency is Urgency.KILL:
            return True
        if self.drain_deadline_s is not None and time.monotonic() >= self.drain_deadline_s:
            return True
        if self._is_node_0:
            return all(child.has_ended() for child in self._api_servers())
        return self.urgency > Urgency.DRAIN or any(self._saw_node_0_end(child) for child in self.children)

    def _saw_node_0_end(self, child: ChildProcess) -> bool:
        return child.failure is not None and child.failure.exit_code is ExitCode.NODE_LOST

    def _api_servers(self) -> list[ChildProcess]:
        return [child for child in self.children if child.spec.title == API_SERVER]

    def _read_signals(self) -> None:
        for number in self.signals.read():
            if number != signal.SIGCHLD:
                self._raise_urgency(Urgency.FINISH if number == signal.SIGINT else Urgency.DRAIN)

    def _raise_urgency(self, asked: Urgency) -> None:
        """Go to `asked`, and at least one further than now; tell the API servers each level on the way."""
        old = self.urgency
        self.urgency = Urgency(min(max(asked, old + 1), Urgency.KILL))
        if not self.is_serving or self.urgency is Urgency.KILL:
            return
        for child in self._api_servers():
            for _ in range(self.urgency - old):
                child.send(Command.DRAIN)
        api = self.config.api
        if self.urgency is Urgency.DRAIN:
            whose = "running requests have" if self._is_node_0 else "node 0 has"
            self.log.note(f"stopping: {whose} {api.drain_timeout_s:g} s to finish")
            self.drain_deadline_s = time.monotonic() + api.drain_grace_s + api.drain_timeout_s + DRAIN_MARGIN_S
        else:
            self.log.note("stopping now: running requests end with an error")
            self.drain_deadline_s = time.monotonic() + DRAIN_MARGIN_S

    def _read_children(self) -> None:
        ended = [child for child in self.children if child.has_ended()]  # before reading: then their last word is there
        for child in self.children:
            for status in child.read_statuses():
                self._handle(child, status)
            if child.has_hung_up and child.status_fd in self.selector.get_map():
                self.selector.unregister(child.status_fd)
        self._raise_first_cause(ended)

    def _handle(self, child: ChildProcess, status: AnyStatus) -> None:
        match status:
            case Progress(phase, duration_s, detail):
                if child is self._first_called(child.spec.title):
                    self.log.phase(phase, duration_s, detail)
                if phase == PORT_PHASE:
                    self.url = detail
                    self._launch_workers()
            case Ready():
                child.is_ready = True
                self._announce_when_ready()
            case Failed():
                child.failure = child.failure or status

    def _first_called(self, title: str) -> ChildProcess:
        """Return the process that speaks for its kind: they all do the same at the same time."""
        return next(child for child in self.children if child.spec.title == title)

    def _launch_workers(self) -> None:
        for child in self.children:
            if not child.has_launched:
                child.launch(self.config)

    def _announce_when_ready(self) -> None:
        if not self.is_serving and all(child.is_ready for child in self.children):
            self.is_serving = True
            self.log.ready(f"{self.url}/v1" if self._is_node_0 else self._place_in_cluster())

    def _place_in_cluster(self) -> str:
        parallel = self.config.parallel
        return f"node {parallel.node_rank} of {parallel.num_nodes}; requests go to node 0, {parallel.master_address}"

    def _raise_first_cause(self, ended: list[ChildProcess]) -> None:
        """Raise what went wrong first: a process that was killed, else one that gives a reason, else one that left.

        What the others report at the same time is a consequence.
        """
        unexplained = [child for child in ended if child.failure is None and not self._may_end(child)]
        for child in unexplained:
            if child.was_killed():
                raise self._death_of(child)
        for child in self.children:
            if child.failure is not None and not self._may_end(child):
                raise StartupError(child.failure.exit_code, child.failure.message)
        for child in unexplained:
            raise self._death_of(child)

    def _may_end(self, child: ChildProcess) -> bool:
        if self.urgency is Urgency.NONE:
            return False
        if self._is_node_0:
            return child.spec.title == API_SERVER and child.ended_well()
        return self._saw_node_0_end(child)

    def _death_of(self, child: ChildProcess) -> StartupError:
        when = "" if self.is_serving else " during the start"
        return StartupError(
            ExitCode.PROCESS_DIED,
            f"the {child.spec.name} process (pid {child.pid}) {child.how_it_ended()}{when}; everything was stopped",
        )
