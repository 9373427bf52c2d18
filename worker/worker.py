"""The worker process: loads the model, takes its memory, then runs one step after the other until it is ended.

It starts in phases that it reports (weights, memory), tells the engine core how many blocks there are and how fast it
computes and copies, and then only answers steps, in the order in which they come. A frame that is not a step is logged
and dropped. Anything unexpected ends the process: the supervisor starts it anew, and requests resume from their logs.
"""

from __future__ import annotations

import logging

import torch

from octavo.protocol.codec import decode_scheduler_output, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import ExitCode, Launch, Reporter, StartupError
from octavo.protocol.transport import Connection, Receiver
from octavo.protocol.worker_messages import WorkerReady
from octavo.worker.block_copies import BlockCopier, Tier, measure_copied_blocks_per_s
from octavo.worker.device import MIB, free_memory_bytes, select_device, select_dtype, set_threads
from octavo.worker.kv_cache import (
    allocate_host_cache,
    allocate_kv_cache,
    block_num_bytes,
    describe_kv_cache,
    plan_num_blocks,
    plan_num_host_blocks,
)
from octavo.worker.largest_step import measure_largest_step
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import LlamaConfig
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.weight_loader import load_model, weights_num_bytes

logger = logging.getLogger(__name__)


def _check_vocab_size(config: EngineConfig, model_config: LlamaConfig) -> None:
    """Token ids are checked against the one number, and index a table of the other."""
    if config.model.vocab_size != model_config.vocab_size:
        raise StartupError(
            ExitCode.BAD_WEIGHTS,
            f"{config.model.path}: vocab_size is {model_config.vocab_size} in config.json, "
            f"the server was started for {config.model.vocab_size}",
        )


def _load_weights(
    config: EngineConfig, model_config: LlamaConfig, device: torch.device, reporter: Reporter
) -> tuple[LlamaForCausalLM, torch.dtype]:
    dtype, reason = select_dtype(config.model.dtype, model_config.dtype)
    model = load_model(config.model, model_config, dtype, device)
    name = str(dtype).removeprefix("torch.")
    size = f"{weights_num_bytes(model) / MIB:.0f} MiB"
    notes = [config.model.weights_format, name, size, *([reason] if reason else [])]
    reporter.progress("weights", ", ".join(notes))
    return model, dtype


def _prepare_memory(
    config: EngineConfig,
    model: LlamaForCausalLM,
    sampler: Sampler,
    dtype: torch.dtype,
    device: torch.device,
    reporter: Reporter,
) -> tuple[BlockCopier, float]:
    """Measure, then allocate both tiers of the KV cache; return them and the tokens of a large step per second."""
    cache, free_bytes = config.cache, free_memory_bytes()
    step = measure_largest_step(model, sampler, config, dtype, device)
    block_bytes = block_num_bytes(model.kv_shape, cache.block_size, dtype)
    num_host_blocks = plan_num_host_blocks(cache, block_bytes, free_bytes, step.num_bytes)
    left_bytes = free_bytes - num_host_blocks * block_bytes
    num_blocks = plan_num_blocks(cache, block_bytes, config.model.max_model_len, left_bytes, step.num_bytes)
    kv_cache = allocate_kv_cache(model.kv_shape, num_blocks, cache.block_size, dtype, device)
    host_cache = allocate_host_cache(model.kv_shape, num_host_blocks, kv_cache)
    reporter.progress(
        "memory",
        f"{free_bytes / MIB:.0f} MiB free, largest step {step.num_bytes / MIB:.0f} MiB, "
        f"{describe_kv_cache(kv_cache, host_cache)}",
    )
    return BlockCopier(kv_cache, host_cache, cache.check_swapped_blocks), step.tokens_per_s


def build_runner(
    config: EngineConfig, model_config: LlamaConfig, reporter: Reporter, rank: int = 0
) -> tuple[ModelRunner, WorkerReady]:
    """Do all of the start but for the socket, and return what to tell the engine core; raises StartupError."""
    _check_vocab_size(config, model_config)
    device = select_device(config.parallel)
    num_threads = set_threads(config.parallel)
    logger.info("%s with %d threads", device, num_threads)
    model, dtype = _load_weights(config, model_config, device, reporter)
    sampler = Sampler(model_config.vocab_size, config.model.eos_token_ids, device)
    copier, prefill_tokens_per_s = _prepare_memory(config, model, sampler, dtype, device, reporter)
    ready = WorkerReady(
        rank=rank,
        num_device_blocks=copier.num_blocks(Tier.DEVICE),
        num_host_blocks=copier.num_blocks(Tier.HOST),
        copied_blocks_per_s=measure_copied_blocks_per_s(copier),
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    logger.info("%.0f prompt tokens/s, %.0f copied blocks/s", prefill_tokens_per_s, ready.copied_blocks_per_s)
    states = RequestStates(config.scheduler.max_num_seqs, config.model.max_model_len, config.cache.block_size)
    return ModelRunner(model, copier.caches[Tier.DEVICE], sampler, states, copier), ready


def serve_frame(runner: ModelRunner, connection: Receiver, frame: bytes) -> None:
    """Run the step in `frame` and send its result; a frame that is not a step is dropped.

    Raises RuntimeError when the engine core takes no results any more.
    """
    try:
        step = decode_scheduler_output(frame)
    except ValueError:  # msgspec's errors and bad UTF-8 both are one
        logger.warning("dropped a frame of %d bytes that is not a step", len(frame))
        return
    if not connection.send(encode(runner.execute(step))):
        raise RuntimeError("the engine core takes no results")


def run_worker(launch: Launch, model_config: LlamaConfig, reporter: Reporter) -> None:
    """Start, report ready, and serve steps until the process is ended; raises StartupError."""
    runner, ready = build_runner(launch.config, model_config, reporter, launch.index)
    connection = Connection(launch.config.worker_address, f"worker-{launch.index}")
    connection.send(encode(ready))
    reporter.ready(f"{ready.num_device_blocks} KV blocks")
    while True:
        frame = connection.receive(timeout_s=None)
        if frame is not None:
            serve_frame(runner, connection, frame)
