"""The process around the engine core: commands in, outputs out, one thread, one wait.

A turn of the loop: wait until a frame is there; apply commands; apply results; schedule; send. Steps go out before
outputs, because workers wait for those. Invariant: the loop never waits for a peer: one that does not take its outputs
loses its requests. Every API server hears the state whenever it changed, also when an abort changed it and no step
follows. Commands that come before the workers are ready stay in the socket until then. Rejected: threads for
input and output, because a frame costs microseconds and a second thread would only take turns with the first.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

import msgspec

from octavo.engine_core.engine_core import EngineCore
from octavo.engine_core.executor import WorkerExecutor
from octavo.engine_core.scheduler import UnexpectedResultError
from octavo.engine_core.stats import FrameCounters
from octavo.protocol.codec import decode_engine_command, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    EngineCommand,
    EngineOutput,
    EngineReady,
    EngineStats,
    Hello,
)
from octavo.protocol.lifecycle import ExitCode, Reporter, StartupError
from octavo.protocol.transport import Listener, Peer, wait_readable
from octavo.protocol.worker_link import listen_to_workers
from octavo.protocol.worker_messages import WorkerReady

logger = logging.getLogger(__name__)

MAX_COMMANDS_PER_TURN = 256  # a flood of commands must not keep results waiting
MAX_WORKER_FRAMES_PER_TURN = 16
MORE_MEMORY = "raise --memory-utilization (on a GPU --gpu-memory-utilization) or --kv-cache-memory"


class Server:
    """The engine core and its two sockets, once the workers are ready."""

    def __init__(self, config: EngineConfig, listener: Listener, executor: WorkerExecutor, memory: WorkerReady) -> None:
        self.listener = listener
        self.executor = executor
        self.engine_core = EngineCore(config, executor, memory)
        self.engine_ready = EngineReady(
            PROTOCOL_VERSION, config.cache.block_size, memory.num_device_blocks, config.model.max_model_len
        )
        self.peers: dict[Peer, None] = {}  # API servers in the order in which they came
        self.frame_counters = FrameCounters()
        self._sent_stats: EngineStats | None = None

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self.turn(self.executor.check_interval_s)

    def turn(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` (None: for ever) for a frame, then do all that it leads to."""
        wait_readable([self.listener, self.executor.listener], timeout_s)
        self.executor.check()
        self._apply_commands()
        self._apply_results()
        self.engine_core.step()
        while lost_peers := self._send_outputs():
            self._forget(lost_peers)
        self.engine_core.check_idle()

    def _apply_commands(self) -> None:
        for _ in range(MAX_COMMANDS_PER_TURN):
            received = self.listener.receive()
            if received is None:
                return
            peer, frame = received
            try:
                command = decode_engine_command(frame)
            except (msgspec.MsgspecError, RecursionError) as problem:
                self._count_bad_frame(peer, problem)
            else:
                self._apply(peer, command)

    def _apply(self, peer: Peer, command: EngineCommand) -> None:
        match command:
            case AddRequest():
                self.engine_core.add(peer, command)
            case AbortRequests():
                self.engine_core.abort(command)
            case Hello():
                self._greet(peer, command)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            logger.error("%r speaks protocol %d, not %d", peer, hello.protocol_version, PROTOCOL_VERSION)
        if self.listener.send(peer, encode(self.engine_ready)):
            self.peers[peer] = None
            self._sent_stats = None  # the newcomer has none

    def _apply_results(self) -> None:
        for _ in range(MAX_WORKER_FRAMES_PER_TURN):
            result = self.executor.receive_result()
            if result is None:
                return
            try:
                self.engine_core.update(result)
            except UnexpectedResultError as problem:
                self.executor.count_bad_frame(str(problem))

    def _send_outputs(self) -> list[Peer]:
        """Send outputs, and the state if it changed; return the peers that could not take them."""
        outputs = self.engine_core.take_outputs()
        stats = self.engine_core.stats()
        if not outputs and stats == self._sent_stats:
            return []
        self._sent_stats = stats
        return [
            peer
            for peer in self.peers | dict.fromkeys(outputs)
            if not self.listener.send(peer, encode(EngineOutput(outputs.get(peer, []), stats)))
        ]

    def _forget(self, lost_peers: list[Peer]) -> None:
        for peer in lost_peers:
            logger.warning("%r does not take its outputs; its requests are aborted", peer)
            self.peers.pop(peer, None)
            self.engine_core.abort_all_of(peer)

    def _count_bad_frame(self, peer: Peer, problem: Exception) -> None:
        if self.frame_counters.count_bad_frame():
            logger.warning("dropped a frame of %r (%d so far): %s", peer, self.frame_counters.num_bad_frames, problem)


def common_memory(config: EngineConfig, workers: Sequence[WorkerReady]) -> WorkerReady:
    """What every worker has: the fewest blocks, the slowest speeds. Warn when the longest request would not fit.

    Raises StartupError when there is no block at all.
    """
    memory = WorkerReady(
        rank=0,
        num_device_blocks=min(ready.num_device_blocks for ready in workers),
        num_host_blocks=min(ready.num_host_blocks for ready in workers),
        copied_blocks_per_s=min(ready.copied_blocks_per_s for ready in workers),
        prefill_tokens_per_s=min(ready.prefill_tokens_per_s for ready in workers),
    )
    if memory.num_device_blocks < 1:
        raise StartupError(
            ExitCode.OUT_OF_MEMORY,
            f"there is no memory for KV blocks: {MORE_MEMORY}, or use a smaller model",
        )
    num_tokens = memory.num_device_blocks * config.cache.block_size
    if num_tokens < config.model.max_model_len - 1:  # the last token of a request is never computed
        logger.warning(
            "KV blocks hold %s tokens, fewer than --max-model-len %s; longer requests are refused. "
            "Lower --max-model-len, or %s",
            f"{num_tokens:,}",
            f"{config.model.max_model_len:,}",
            MORE_MEMORY,
        )
    return memory


def calm_collector() -> None:
    """Have Python look for reference cycles seldom: each look walks the token lists of all live requests.

    What is there now stays, so it is never looked at; and what a request leaves behind goes without a look.
    """
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def serve(config: EngineConfig, reporter: Reporter) -> None:
    """Bind the sockets, wait for the workers, serve; never returns."""
    listener, worker_listener = Listener(config.engine_address), listen_to_workers(config)
    executor = WorkerExecutor(worker_listener, config.parallel.tensor_parallel_size, config.parallel.num_nodes)
    if config.parallel.num_nodes > 1:
        executor.meet_all_nodes(config)
    memory = common_memory(config, executor.wait_until_ready())
    reporter.progress("kv_blocks", _describe(memory, config.cache.block_size))
    server = Server(config, listener, executor, memory)
    calm_collector()
    reporter.ready()
    server.run()


def _describe(memory: WorkerReady, block_size: int) -> str:
    num_tokens = memory.num_device_blocks * block_size
    device = f"{memory.num_device_blocks:,} blocks of {block_size} tokens = {num_tokens:,} tokens"
    return device + (f", {memory.num_host_blocks:,} blocks on the host" if memory.num_host_blocks else "")
