"""`python -m oracle_worker`, with tests/ on the path: the oracle as a worker process, for tests through real processes.

It speaks to the engine core and the supervisor as the real worker does, and loads nothing.
"""

from __future__ import annotations

from oracle import OracleModel

from octavo.protocol.codec import decode_scheduler_output, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import Launch, Reporter, run_child
from octavo.protocol.transport import Receiver
from octavo.protocol.worker_link import WorkerLink
from octavo.protocol.worker_messages import WorkerReady

DEFAULT_NUM_BLOCKS = 4096


def build(config: EngineConfig) -> tuple[OracleModel, int]:
    """The model that the config asks for, and its number of blocks."""
    num_blocks = config.cache.num_device_blocks or DEFAULT_NUM_BLOCKS
    model = OracleModel(
        num_blocks,
        config.cache.block_size,
        config.model.vocab_size,
        config.model.eos_token_ids,
        config.scheduler.max_num_seqs,
        config.cache.num_host_blocks or 0,
    )
    return model, num_blocks


def ready(config: EngineConfig, rank: int, num_blocks: int) -> WorkerReady:
    """What the worker reports of itself; its speeds are not measured."""
    return WorkerReady(rank, num_blocks, config.cache.num_host_blocks or 0)


def run_step(model: OracleModel, connection: Receiver, rank: int, timeout_s: float | None) -> bool:
    """Execute the next step, if one comes within `timeout_s`; rank 0 sends the result. False when none came."""
    frame = connection.receive(timeout_s)
    if frame is None:
        return False
    result = model.execute(decode_scheduler_output(frame))
    if rank == 0:
        connection.send(encode(result))
    return True


def main(launch: Launch, reporter: Reporter) -> None:
    with WorkerLink(launch, reporter) as link:
        model, num_blocks = build(launch.config)
        link.send(encode(ready(launch.config, launch.index, num_blocks)))
        reporter.ready()
        while True:
            run_step(model, link, launch.index, timeout_s=None)


if __name__ == "__main__":
    run_child("oracle_worker", main)
