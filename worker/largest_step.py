"""The largest step that the limits allow, run at the start to see how much memory it takes and how fast it is.

Every token of the budget is computed, each chunk at the end of the longest context, and as many rows as there may be
requests are sampled with every option in use. Values do not matter, so the cache holds zeros and all block tables name
block 0. One layer is run: the next ones would take the same memory again, and seconds at long contexts.

The speed is that of a second run, in half the context, as the tokens of a long prompt have it on average. Where the
first run takes so long that another one would be felt at the start, it is that of the first run.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np
import torch

from octavo.protocol.config import EngineConfig
from octavo.protocol.sampling_params import SamplingParams
from octavo.worker.device import explain_out_of_memory, measure_peak_growth_bytes
from octavo.worker.kv_cache import LOWER_STEP_SIZE
from octavo.worker.layers.attention import AttentionMetadata
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.sampler import Sampler, SamplingRows
from octavo.worker.sampling_table import SamplingTable

MAX_SECOND_RUN_S = 0.3
ALL_OPTIONS = SamplingParams(max_tokens=2, min_tokens=1, temperature=0.5, top_k=50, top_p=0.5, min_p=0.01)


class LargestStep(NamedTuple):
    """What the largest step costs.

    Attributes:
        num_bytes: by which memory grows while it runs.
        tokens_per_s: of a large step of prompts through all layers.
    """

    num_bytes: int
    tokens_per_s: float


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


def _rows_with_all_options(num_rows: int) -> SamplingRows:
    table = SamplingTable(1)
    table.assign(0, ALL_OPTIONS)
    return SamplingRows(table, np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64))


@torch.inference_mode()
def measure_largest_step(
    model: LlamaForCausalLM, sampler: Sampler, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> LargestStep:
    """Run the largest step and return what it costs; raises StartupError(OUT_OF_MEMORY)."""
    positions, metadata = largest_inputs(config)
    positions, metadata = positions.to(device), AttentionMetadata(*(tensor.to(device) for tensor in metadata))
    block_size, sizes = config.cache.block_size, model.kv_shape
    num_blocks = math.ceil(len(positions) / block_size)
    shape = (1, 2, num_blocks, block_size, sizes.num_kv_heads, sizes.head_dim)
    sampled = _rows_with_all_options(config.scheduler.max_num_seqs)
    layer_times_s: list[float] = []

    def run_layer(metadata: AttentionMetadata) -> torch.Tensor:
        started_s = time.perf_counter()
        hidden = model(torch.zeros_like(positions), positions, kv_cache, metadata)
        layer_times_s.append(time.perf_counter() - started_s)
        return hidden

    def run() -> None:
        logits = model.compute_logits(run_layer(metadata)[:1].expand(len(sampled.rows), -1))
        sampler.sample(logits, sampler.prepare(sampled))

    with explain_out_of_memory("the largest step", None, LOWER_STEP_SIZE):
        kv_cache = torch.empty(shape, dtype=dtype, device=device).zero_()  # zero_ touches it before the measuring
        num_bytes = measure_peak_growth_bytes(run)
    if layer_times_s[0] / 2 <= MAX_SECOND_RUN_S:  # half the context takes half the time, at long contexts
        longest_chunk = metadata.query_start_loc.diff().max()
        run_layer(metadata._replace(seq_lens=torch.maximum(metadata.seq_lens // 2, longest_chunk)))
    return LargestStep(num_bytes, len(positions) / (layer_times_s[-1] * sizes.num_layers))
