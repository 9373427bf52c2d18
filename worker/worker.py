"""The worker process: loads the model, takes its memory, then runs one step after the other until it is ended.

It starts in phases that it reports (weights, memory, graphs), tells the engine core how many blocks there are and how
fast it computes and copies, and then only answers steps, in the order in which they come (`step_loop`). Anything
unexpected ends the process: the supervisor starts it anew, and requests resume from their logs. The ranks of a group
meet before anything is loaded, because how long that takes differs between machines.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from octavo.protocol.codec import encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import ExitCode, Launch, Reporter, StartupError
from octavo.protocol.transport import Receiver
from octavo.protocol.worker_messages import WorkerReady
from octavo.worker.block_copies import BlockCopier, Tier, measure_copied_blocks_per_s
from octavo.worker.device import MIB, TORCH_DTYPES, Device, out_of_memory
from octavo.worker.device_selection import select_device, set_threads
from octavo.worker.distributed import TensorParallelGroup, make_group, smallest_of_ranks
from octavo.worker.grammar import Grammars
from octavo.worker.host import free_memory_bytes
from octavo.worker.kv_cache import (
    allocate_host_cache,
    allocate_kv_cache,
    block_num_bytes,
    describe_kv_cache,
    plan_num_blocks,
    plan_num_host_blocks,
    select_kv_dtype,
)
from octavo.worker.largest_step import LargestStep, measure_largest_step
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import LlamaConfig
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.page_supply import PageSupply
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.step_loop import StepLoop
from octavo.worker.weight_formats import describe_formats
from octavo.worker.weight_loader import load_model, weights_num_bytes

logger = logging.getLogger(__name__)

LOWER_GRAPHS = "lower --gpu-memory-utilization, or use --enforce-eager"


class Place(NamedTuple):
    """Where this worker computes, and with whom; `kv_dtype` is that of the KV cache."""

    device: Device
    group: TensorParallelGroup
    dtype: torch.dtype
    kv_dtype: torch.dtype


def _check_vocab_size(config: EngineConfig, model_config: LlamaConfig) -> None:
    """Token ids are checked against the one number, and index a table of the other."""
    if config.model.vocab_size != model_config.vocab_size:
        raise StartupError(
            ExitCode.BAD_WEIGHTS,
            f"{config.model.path}: vocab_size is {model_config.vocab_size} in config.json, "
            f"the server was started for {config.model.vocab_size}",
        )


def _log_kernels(choice: dict[str, str]) -> None:
    """Say which ops run on what: the backend of most, then those that run on another."""
    if choice:
        usual = Counter(choice.values()).most_common(1)[0][0]
        others = ", ".join(f"{op} on {backend}" for op, backend in sorted(choice.items()) if backend != usual)
        logger.info("kernels: %s%s", usual, f", but {others}" if others else "")


def _agree_on_dtype(place: Place) -> None:
    """Raise StartupError(USAGE) on a rank whose machine made it choose another dtype than rank 0."""
    dtypes = list(TORCH_DTYPES.values())
    own = torch.full((1,), dtypes.index(place.dtype), device=place.device.torch_device)
    chosen = dtypes[int(place.group.broadcast(own))]
    if chosen is not place.dtype:
        raise StartupError(
            ExitCode.USAGE, f"rank {place.group.rank} would compute in {place.dtype}, rank 0 in {chosen}: give --dtype"
        )


def _load_weights(
    config: EngineConfig, model_config: LlamaConfig, place: Place, reason: str
) -> tuple[LlamaForCausalLM, str]:
    """Return this rank's model, and what to say about it."""
    device = place.device
    model = load_model(
        config.model,
        model_config,
        place.dtype,
        device.torch_device,
        place.group,
        free_bytes=device.free_bytes(),
        packs_weights=device.packs_weights,
    )
    name = str(place.dtype).removeprefix("torch.")
    size = f"{weights_num_bytes(model) / MIB:.0f} MiB"
    parts = (config.model.weights_format, name, size, describe_formats(model), reason)
    return model, ", ".join(part for part in parts if part)


def _prepare_memory(
    config: EngineConfig, model: LlamaForCausalLM, sampler: Sampler, place: Place
) -> tuple[BlockCopier, LargestStep, str]:
    """Measure, then allocate both tiers of the KV cache; return them, what was measured, and what to say about it.

    Every rank gets as many device blocks as the one with the least memory. More would never be used, and the ranks
    would not agree on which steps fit into a graph: one would sum padded rows while another one sums those of the step.
    """
    cache, device = config.cache, place.device
    free_bytes = device.free_bytes()
    step = measure_largest_step(model, sampler, config, place.kv_dtype, device)
    block_bytes = block_num_bytes(model.kv_shape, cache.block_size, place.kv_dtype)
    num_host_blocks, left_bytes = _plan_host_tier(config, block_bytes, free_bytes, step.num_bytes, device)
    budget = device.kv_budget(cache, left_bytes, step.num_bytes + step.graph_bytes)
    num_blocks = plan_num_blocks(cache, block_bytes, config.model.max_model_len, budget)
    num_blocks = smallest_of_ranks(place.group, num_blocks, device.torch_device)
    kv_cache = allocate_kv_cache(model.kv_shape, num_blocks, cache.block_size, place.kv_dtype, device)
    host_cache = allocate_host_cache(model.kv_shape, num_host_blocks, kv_cache, device)
    graphs = f", graphs about {step.graph_bytes / MIB:.0f} MiB" if step.graph_bytes else ""
    detail = (
        f"{free_bytes / MIB:.0f} MiB free, largest step {step.num_bytes / MIB:.0f} MiB{graphs}, "
        f"{describe_kv_cache(kv_cache, host_cache)}"
    )
    return BlockCopier(kv_cache, host_cache, cache.check_swapped_blocks, device), step, detail


def _plan_host_tier(
    config: EngineConfig, block_bytes: int, free_bytes: int, step_bytes: int, device: Device
) -> tuple[int, int]:
    """Return the number of host blocks, and what they leave of the device's `free_bytes`."""
    if device.uses_host_memory:
        num_blocks = plan_num_host_blocks(config.cache, block_bytes, free_bytes, step_bytes)
        return num_blocks, free_bytes - num_blocks * block_bytes
    host_bytes = free_memory_bytes() // config.parallel.num_local_workers
    return plan_num_host_blocks(config.cache, block_bytes, host_bytes, step_bytes=0), free_bytes


def _capture_graphs(runner: ModelRunner, step: LargestStep) -> str:
    """Capture, see that the largest step still fits, and return what to say about it."""
    device = runner.device
    before_bytes = device.free_bytes()
    runner.capture_graphs()
    taken_bytes = before_bytes - device.free_bytes()
    if device.free_bytes() < step.num_bytes:
        raise out_of_memory("the largest step beside the graphs", step.num_bytes, LOWER_GRAPHS, device.free_bytes())
    sizes = runner.graphs.sizes
    return f"{len(sizes)} graphs up to {sizes[-1]} requests, {max(0, taken_bytes) / MIB:.0f} MiB"


def build_runner(
    config: EngineConfig,
    model_config: LlamaConfig,
    reporter: Reporter,
    rank: int = 0,
    device: Device | None = None,
) -> tuple[ModelRunner, WorkerReady]:
    """Do all of the start but for the socket, and return what to tell the engine core; raises StartupError.

    `rank` counts over all nodes. `device` is the one to use instead of what the config says.
    """
    _check_vocab_size(config, model_config)
    set_threads(config.parallel)
    device = device or select_device(config.parallel, rank)
    logger.info("%s", device.describe())
    _log_kernels(device.select_kernels(config.parallel.deterministic))
    dtype, reason = device.select_dtype(config.model.dtype, model_config.dtype)
    kv_dtype = select_kv_dtype(config.cache.kv_cache_dtype, dtype, device.uses_host_memory)
    place = Place(device, make_group(config, rank, device.torch_device), dtype, kv_dtype)
    _agree_on_dtype(place)
    model, detail = _load_weights(config, model_config, place, reason)
    reporter.progress("weights", detail)
    sampler = Sampler(model_config.vocab_size, config.model.eos_token_ids)
    copier, step, detail = _prepare_memory(config, model, sampler, place)
    reporter.progress("memory", detail)
    runner = _make_runner(config, model, sampler, copier, place)
    if device.has_graphs and not config.parallel.enforce_eager:
        reporter.progress("graphs", _capture_graphs(runner, step))
    if device.records_steps and not config.parallel.enforce_eager and place.group.size == 1:
        reporter.progress("graphs", runner.record_steps())
    ready = WorkerReady(
        rank=rank,
        num_device_blocks=copier.num_blocks(Tier.DEVICE),
        num_host_blocks=copier.num_blocks(Tier.HOST),
        copied_blocks_per_s=measure_copied_blocks_per_s(copier),
        prefill_tokens_per_s=step.tokens_per_s,
    )
    logger.info("%.0f prompt tokens/s, %.0f copied blocks/s", step.tokens_per_s, ready.copied_blocks_per_s)
    return runner, ready


def _make_runner(
    config: EngineConfig, model: LlamaForCausalLM, sampler: Sampler, copier: BlockCopier, place: Place
) -> ModelRunner:
    scheduler = config.scheduler
    num_spare_rows = scheduler.max_num_seqs * (scheduler.max_steps_in_flight - 1)
    states = RequestStates(scheduler.max_num_seqs, config.model.max_model_len, config.cache.block_size, num_spare_rows)
    tokenizer_path = Path(config.model.path) / "tokenizer.json"
    return ModelRunner(
        model,
        copier.caches[Tier.DEVICE],
        sampler,
        states,
        copier,
        place.device,
        place.group,
        scheduler.max_num_batched_tokens,
        Grammars(tokenizer_path, sampler.vocab_size, config.model.eos_token_ids),
    )


def run_worker(launch: Launch, model_config: LlamaConfig, link: Receiver, reporter: Reporter) -> None:
    """Start, report ready, and serve steps until the process is ended; raises StartupError."""
    runner, ready = build_runner(launch.config, model_config, reporter, launch.index)
    link.send(encode(ready))
    reporter.ready(f"{ready.num_device_blocks} KV blocks")
    pages = PageSupply(runner.kv_cache) if runner.device.uses_host_memory else None
    loop = StepLoop(runner, link, launch.config.scheduler.max_steps_in_flight, pages)
    while True:
        loop.turn()
