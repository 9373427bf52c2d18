"""An engine core behind its real sockets: server and oracle workers in threads, API servers in the test itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from oracle_worker import build, ready, run_step

from octavo.engine_core.executor import WorkerExecutor
from octavo.engine_core.server import Server, common_memory
from octavo.protocol.codec import decode_engine_event, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import (
    AbortRequests,
    AddRequest,
    EngineOutput,
    EngineReady,
    EngineStats,
    FinishReason,
    Hello,
    RequestOutput,
)
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.transport import Connection, Listener

PATIENCE_S = 20.0
TURN_S = 0.02


class Background(threading.Thread):
    """A thread that calls `turn` until it is stopped; the test fails with what it raised."""

    def __init__(self, set_up: Callable[[], tuple[Callable[[], object], Callable[[], None]]]) -> None:
        super().__init__(daemon=True)
        self.set_up = set_up
        self.is_stopping = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            turn, close = self.set_up()
            try:
                while not self.is_stopping.is_set():
                    turn()
            finally:
                close()
        except BaseException as problem:  # noqa: BLE001 - raised again by stop
            self.problem = problem

    def stop(self) -> None:
        self.is_stopping.set()
        self.join(PATIENCE_S)
        if self.problem is not None:
            raise self.problem


class ServerThread(Background):
    """What `serve` does, until it is stopped. The server object may be looked at after that."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(self._serve)
        self.config = config
        self.server: Server

    def _serve(self) -> tuple[Callable[[], object], Callable[[], None]]:
        listener, worker_listener = Listener(self.config.engine_address), Listener(self.config.worker_address)
        executor = WorkerExecutor(worker_listener, self.config.parallel.tensor_parallel_size)
        memory = common_memory(self.config, executor.wait_until_ready())
        self.server = Server(self.config, listener, executor, memory)

        def close() -> None:
            listener.close()
            worker_listener.close()

        return lambda: self.server.turn(TURN_S), close


class WorkerThread(Background):
    """An oracle worker. Set `paused` before the start and it takes no step until it is cleared; it may send `noise`."""

    def __init__(self, config: EngineConfig, rank: int = 0, num_blocks: int | None = None) -> None:
        super().__init__(self._work)
        self.config = config
        self.rank = rank
        self.num_blocks = num_blocks
        self.paused = threading.Event()
        self.noise: list[bytes] = []
        self.num_steps = 0

    def _work(self) -> tuple[Callable[[], object], Callable[[], None]]:
        model, num_blocks = build(self.config)
        connection = Connection(self.config.worker_address, f"worker-{self.rank}")
        connection.send(encode(ready(self.config, self.rank, self.num_blocks or num_blocks)))

        def turn() -> None:
            while self.noise:
                connection.send(self.noise.pop())
            if self.paused.is_set():
                time.sleep(TURN_S)
            else:
                self.num_steps += run_step(model, connection, self.rank, TURN_S)

        return turn, connection.close


class ApiServer:
    """What an API server does on its socket: keeps logs of its requests and the last state that it heard."""

    def __init__(self, config: EngineConfig, name: str = "api-0") -> None:
        self.connection = Connection(config.engine_address, name)
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}

    def hello(self) -> None:
        self.connection.send(encode(Hello()))

    def add(self, request_id: str, prompt: list[int], **params: object) -> AddRequest:
        sampling_params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})  # type: ignore[arg-type]
        command = AddRequest(request_id, prompt, sampling_params, 0.0)
        self.connection.send(encode(command))
        return command

    def abort(self, *request_ids: str) -> None:
        self.connection.send(encode(AbortRequests(list(request_ids))))

    def receive(self, timeout_s: float = PATIENCE_S) -> bool:
        """Take the next event in; False when none came in time."""
        frame = self.connection.receive(timeout_s)
        if frame is None:
            return False
        event = decode_engine_event(frame)
        match event:
            case EngineReady():
                self.ready = event
            case EngineOutput():
                self.stats = event.stats
                for output in event.outputs:
                    self._append(output)
        return True

    def _append(self, output: RequestOutput) -> None:
        log = self.outputs.setdefault(output.request_id, [])
        assert output.request_id not in self.ends
        assert output.first_index == len(log)
        log += output.token_ids
        if output.finish_reason is not None:
            self.ends[output.request_id] = output

    def wait_until(self, is_true: Callable[[], object]) -> None:
        """Receive until `is_true`; fail when nothing comes any more."""
        while not is_true():
            assert self.receive(), "the engine core said nothing for too long"

    def wait_for(self, request_id: str) -> tuple[list[int], FinishReason | None]:
        self.wait_until(lambda: request_id in self.ends)
        return self.outputs[request_id], self.ends[request_id].finish_reason

    def close(self) -> None:
        self.connection.close()
