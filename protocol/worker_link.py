"""The border between the engine core and its workers: how each side opens it, on one machine or between several.

On one machine it is a socket, and the supervisor sees every death. With several nodes a worker first says hello and
waits until all nodes are there and were started alike; and a worker on another node than 0 watches the connection,
because when node 0 is gone nobody else there knows; on node 0 the supervisor sees that first. Invariant: with several
nodes no worker loads anything before all nodes have met, and none outlives the connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from types import TracebackType

import msgspec

from octavo.protocol.agreement import agreement_of
from octavo.protocol.cluster_key import key_between_nodes
from octavo.protocol.codec import decode_engine_hello, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import ExitCode, Failed, Launch, Reporter, StartupError
from octavo.protocol.transport import Connection, ConnectionEvent, Listener
from octavo.protocol.worker_messages import WorkerHello

MAX_REFUSALS = 3  # one may be an engine core that ends at this moment, or another server that leaves the port
HELLO_MARGIN_S = 5.0  # node 0 waits for the last node for `node_timeout_s`; its answer needs a moment more
CAUSE_PATIENCE_S = 2.0
TURN_S = 0.2


def listen_to_workers(config: EngineConfig) -> Listener:
    """Open the engine core's side: a socket in the private directory, or with several nodes one for all of them.

    Raises StartupError when the address is not one of this machine, or the port is taken.
    """
    parallel = config.parallel
    key = key_between_nodes(parallel)
    if key is None:
        return Listener(config.worker_address)
    try:
        address = socket.getaddrinfo(parallel.master_address, parallel.master_port, type=socket.SOCK_STREAM)[0][4][0]
        return Listener(f"tcp://{f'[{address}]' if ':' in str(address) else address}:{parallel.master_port}", key)
    except OSError as problem:
        place = f"--master-addr {parallel.master_address} --master-port {parallel.master_port}"
        is_taken = problem.errno == errno.EADDRINUSE
        raise StartupError(
            ExitCode.PORT_TAKEN if is_taken else ExitCode.USAGE, f"cannot listen at {place}: {problem.strerror}"
        ) from problem


class WorkerLink:
    """The connection of one worker. As a context manager: open inside."""

    def __init__(self, launch: Launch, reporter: Reporter) -> None:
        self.launch = launch
        self.parallel = launch.config.parallel
        self.reporter = reporter
        self.connection: Connection
        self._is_watched = False

    def __enter__(self) -> WorkerLink:
        """Connect, and meet the other nodes if there are any; raises StartupError when that fails."""
        config = self.launch.config
        key = key_between_nodes(self.parallel)
        self.connection = Connection(config.worker_address, f"worker-{self.launch.index}", key)
        if self.parallel.num_nodes > 1:
            self._reach_node_0()
            self._meet_all_nodes()
            self.reporter.progress("nodes", f"{self.parallel.num_nodes} met at {self._place}")
        if self.parallel.node_rank > 0:
            self._is_watched = True
            threading.Thread(target=self._watch, daemon=True, name="node 0").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let the news of another process's death arrive first, when that may be what failed here."""
        is_surprise = isinstance(problem, Exception) and not isinstance(problem, StartupError)
        if is_surprise and self.parallel.tensor_parallel_size > 1:
            time.sleep(CAUSE_PATIENCE_S)
        if not self._is_watched:  # a socket must not be closed while another thread waits for it
            self.connection.close()

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Return the next frame; None when none comes within `timeout_s`, or only a sign of life."""
        return self.connection.receive(timeout_s) or None

    def send(self, frame: bytes) -> bool:
        """Queue `frame`; False when the queue is full."""
        return self.connection.send(frame)

    @property
    def _place(self) -> str:
        return f"{self.parallel.master_address}:{self.parallel.master_port}"

    @property
    def _gone_text(self) -> str:
        return f"node 0 at {self._place} is gone, and this node ends with it; node 0 has the reason in its log"

    def _reach_node_0(self) -> None:
        limit_s = self.parallel.node_timeout_s
        deadline_s, num_refusals = time.monotonic() + limit_s, 0
        while (left_s := deadline_s - time.monotonic()) > 0:
            event = self.connection.next_event(left_s)
            if event is ConnectionEvent.MET:
                return
            num_refusals += event is ConnectionEvent.REFUSED
            if num_refusals == MAX_REFUSALS:
                raise StartupError(
                    ExitCode.USAGE,
                    f"what listens at {self._place} does not have this node's key: give all nodes the same "
                    "--cluster-key-file, and check --master-addr and --master-port",
                )
        raise StartupError(
            ExitCode.NODE_LOST,
            f"cannot reach node 0 at {self._place} within {limit_s:g} s: start it, let that port through the "
            "firewall, or correct --master-addr and --master-port",
        )

    def _meet_all_nodes(self) -> None:
        self.connection.send(encode(WorkerHello(self.launch.index, agreement_of(self.launch.config))))
        deadline_s, frame = time.monotonic() + self.parallel.node_timeout_s + HELLO_MARGIN_S, None
        while frame is None and time.monotonic() < deadline_s:
            is_lost = self.connection.next_event(0) is ConnectionEvent.LOST
            frame = self.connection.receive(0 if is_lost else TURN_S)
            if is_lost and frame is None and self.parallel.node_rank > 0:  # on node 0 the supervisor sees it
                raise StartupError(ExitCode.NODE_LOST, self._gone_text)
        if frame is None:
            raise StartupError(
                ExitCode.NODE_LOST,
                f"node 0 at {self._place} does not answer: does another node run with --node-rank "
                f"{self.parallel.node_rank}?",
            )
        self._take_hello(frame)

    def _take_hello(self, frame: bytes) -> None:
        try:
            hello = decode_engine_hello(frame)
        except msgspec.MsgspecError as problem:
            text = f"node 0 at {self._place} speaks another protocol: install the same version of Octavo on all nodes"
            raise StartupError(ExitCode.USAGE, text) from problem
        if hello.problem:
            raise StartupError(ExitCode(hello.exit_code), hello.problem)

    def _watch(self) -> None:
        while self.connection.next_event(timeout_s=None) is not ConnectionEvent.LOST:
            pass
        self.reporter.send(Failed(ExitCode.NODE_LOST, self._gone_text))
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(ExitCode.NODE_LOST)
