"""`python -m octavo.worker.replay`: a worker that says what a script has it say, without a model.

For tests of clients, prompts and parsers, and as an engine that costs nothing when the HTTP side is measured: the
supervisor, engine core and API server are the real ones. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import math
import time

from octavo.protocol.codec import decode_scheduler_output, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import ExitCode, Launch, Reporter, StartupError, run_child
from octavo.protocol.transport import Receiver
from octavo.protocol.worker_link import WorkerLink
from octavo.protocol.worker_messages import WorkerReady
from octavo.worker.replay.answers import load_answers
from octavo.worker.replay.replayer import Replayer
from octavo.worker.replay.script import read_script

DEFAULT_NUM_BLOCKS = 2**16  # blocks hold nothing here; a million tokens is more than most tests want


def main(launch: Launch, reporter: Reporter) -> None:
    config = launch.config
    with WorkerLink(launch, reporter) as link:
        replayer = load_replayer(config)
        reporter.progress("script", str(config.replay_script))
        ready = WorkerReady(launch.index, num_device_blocks(config), config.cache.num_host_blocks or 0)
        link.send(encode(ready))
        reporter.ready(f"{ready.num_device_blocks} KV blocks")
        serve_steps(replayer, link, is_answering=launch.index == 0)


def load_replayer(config: EngineConfig) -> Replayer:
    """Read the script and the tokenizer; raises StartupError."""
    if config.replay_script is None:
        raise StartupError(ExitCode.USAGE, "the replay worker needs a script: octavo serve --engine replay SCRIPT")
    lines = read_script(config.replay_script)
    return Replayer(load_answers(config.replay_script, lines, config.model), config.model.vocab_size)


def num_device_blocks(config: EngineConfig) -> int:
    """Return what was asked for, else enough for one request of any length."""
    num_needed = math.ceil(config.model.max_model_len / config.cache.block_size)
    return config.cache.num_device_blocks or max(DEFAULT_NUM_BLOCKS, num_needed)


def serve_steps(replayer: Replayer, link: Receiver, is_answering: bool) -> None:
    """Play steps until the process is ended; of several workers the first alone answers, and keeps the pace."""
    last_end_s = 0.0
    while True:
        frame = link.receive(timeout_s=None)
        if frame is None:
            continue
        step = replayer.execute(decode_scheduler_output(frame))
        if not is_answering:
            continue
        last_end_s = sleep_until(last_end_s + step.duration_s)
        if not link.send(encode(step.output)):
            raise RuntimeError("the engine core takes no results")


def sleep_until(moment_s: float) -> float:
    """Sleep until `moment_s` of the monotonic clock, unless that is over; return the later one of it and now."""
    now_s = time.monotonic()
    if moment_s > now_s:
        time.sleep(moment_s - now_s)
    return max(moment_s, now_s)


if __name__ == "__main__":
    run_child("worker", main)
