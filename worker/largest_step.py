"""The largest step that the limits allow, run once at the start to see how much memory it takes.

Every token of the budget is computed, each chunk at the end of the longest context, and as many rows as there may be
requests are sampled with every option in use. Values do not matter, so the cache holds zeros and all block tables name
block 0. One layer is run: the next ones would take the same memory again, and seconds at long contexts.
"""

from __future__ import annotations

import math

import torch

from octavo.protocol.config import EngineConfig
from octavo.protocol.sampling_params import SamplingParams
from octavo.worker.device import explain_out_of_memory, measure_peak_growth_bytes
from octavo.worker.kv_cache import LOWER_STEP_SIZE
from octavo.worker.layers.attention import AttentionMetadata
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.sampler import Sampler, SamplingRow

ALL_OPTIONS = SamplingParams(max_tokens=2, min_tokens=1, temperature=0.5, top_k=50, top_p=0.5, min_p=0.01)


def largest_inputs(config: EngineConfig) -> tuple[torch.Tensor, AttentionMetadata]:
    """Return positions int64 [T], and the metadata of requests that are in their last chunk."""
    num_tokens, max_model_len = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    chunk = min(num_tokens, max_model_len, config.scheduler.max_tokens_per_request or num_tokens)
    num_requests = min(math.ceil(num_tokens / chunk), config.scheduler.max_num_seqs)
    num_tokens = min(num_tokens, num_requests * chunk)
    query_start_loc = torch.arange(0, num_tokens + chunk, chunk, dtype=torch.int32).clamp(max=num_tokens)
    blocks = math.ceil(max_model_len / config.cache.block_size)
    metadata = AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=torch.full((num_requests,), max_model_len, dtype=torch.int32),
        block_tables=torch.zeros((num_requests, blocks), dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens, dtype=torch.int64),
    )
    return torch.arange(num_tokens, dtype=torch.int64) % max_model_len, metadata


@torch.inference_mode()
def measure_largest_step_bytes(
    model: LlamaForCausalLM, sampler: Sampler, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the bytes by which memory grows while the largest step runs; raises StartupError(OUT_OF_MEMORY)."""
    positions, metadata = largest_inputs(config)
    positions, metadata = positions.to(device), AttentionMetadata(*(tensor.to(device) for tensor in metadata))
    block_size, sizes = config.cache.block_size, model.config
    num_blocks = math.ceil(len(positions) / block_size)
    shape = (1, 2, num_blocks, block_size, sizes.num_kv_heads, sizes.head_dim)
    sampling_rows = [SamplingRow(ALL_OPTIONS, 0)] * config.scheduler.max_num_seqs

    def run(kv_cache: torch.Tensor) -> None:
        hidden = model(torch.zeros_like(positions), positions, kv_cache, metadata)
        logits = model.compute_logits(hidden[:1].expand(len(sampling_rows), -1))
        sampler.sample(logits, sampler.prepare(sampling_rows))

    with explain_out_of_memory("the largest step", None, LOWER_STEP_SIZE):
        kv_cache = torch.empty(shape, dtype=dtype, device=device).zero_()  # zero_ touches it before the measuring
        return measure_peak_growth_bytes(lambda: run(kv_cache))
