"""The largest step that the limits allow, run at the start to see how much memory it takes and how fast it is.

Every token of the budget is computed, each chunk at the end of the longest context, and as many rows as there may be
requests are sampled with every option in use. Values do not matter, so the cache holds zeros and all block tables name
block 0. One layer is run: the next ones would take the same memory again, and seconds at long contexts. What requests
keep on the device, such as the counts of their tokens, is part of it, as if it came anew with each step.

The speed is that of a second run, in half the context, as the tokens of a long prompt have it on average. Where the
first run takes so long that another one would be felt at the start, it is that of the first run; but not on a GPU,
whose first run also compiles kernels.

On a GPU a small step of both kinds of requests follows, a token and a few tokens at the end of the longest context: it
compiles the kernels that the large ones have no use for, so that no request waits for that. The partial results of
decode attention take memory too, most of it when all requests have the longest context, which fits where they share it;
so that step is run as well, and the larger one counts.

A captured graph keeps what its operations need for itself, so the largest decode step is run as well where there will
be graphs. What driver and libraries take when they first run is in use afterwards, and so is no part of either figure.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from octavo.kernels.ops.attention import plan_attention
from octavo.protocol.config import EngineConfig
from octavo.protocol.logprobs import MAX_NUM_LOGPROBS
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NewRequest
from octavo.worker.device import Device, explain_out_of_memory
from octavo.worker.distributed import TensorParallelGroup
from octavo.worker.graph import graph_sizes
from octavo.worker.kv_cache import LOWER_STEP_SIZE, block_num_bytes, kv_cache_shape
from octavo.worker.layers.attention import AttentionMetadata
from octavo.worker.logits_edits import LogitsEdits
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.prompt_logprobs import HIDDEN_ROWS, NEXT_TOKENS, ROWS_AT_A_TIME, find_logprobs
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler, SamplingRows
from octavo.worker.step_inputs import REPORTING
from octavo.worker.token_draw import draw_tokens

MAX_SECOND_RUN_S = 0.3
GRAPH_NUM_BYTES = 8 * 2**20  # what the driver keeps of one graph of a model with some ten layers to a hundred
NUM_FEW_TOKENS = 16
ALL_OPTIONS = SamplingParams(
    max_tokens=2,
    min_tokens=1,
    temperature=0.5,
    top_k=50,
    top_p=0.5,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    bad_words=((0,),),
    num_logprobs=MAX_NUM_LOGPROBS,
)


class LargestStep(NamedTuple):
    """What the largest step costs.

    Attributes:
        num_bytes: by which memory grows while it runs.
        tokens_per_s: of a large step of prompts through all layers.
        graph_bytes: an estimate of what the graphs of decode steps will take, 0 without graphs.
    """

    num_bytes: int
    tokens_per_s: float
    graph_bytes: int = 0


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


def decode_inputs(config: EngineConfig, num_requests: int, num_tokens: int) -> tuple[torch.Tensor, AttentionMetadata]:
    """Return the same of requests that compute the last one of `num_tokens` each."""
    blocks = math.ceil(num_tokens / config.cache.block_size)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=torch.full((num_requests,), num_tokens, dtype=torch.int32),
        block_tables=torch.zeros((num_requests, blocks), dtype=torch.int32),
        slot_mapping=torch.arange(num_requests, dtype=torch.int64),
    )
    return torch.full((num_requests,), num_tokens - 1, dtype=torch.int64), metadata


def mixed_inputs(config: EngineConfig) -> tuple[torch.Tensor, AttentionMetadata]:
    """Return the same of two requests with the longest context, one of which computes a token and one a few."""
    max_model_len = config.model.max_model_len
    num_few = min(NUM_FEW_TOKENS, max_model_len)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 1 + num_few], dtype=torch.int32),
        seq_lens=torch.full((2,), max_model_len, dtype=torch.int32),
        block_tables=torch.zeros((2, math.ceil(max_model_len / config.cache.block_size)), dtype=torch.int32),
        slot_mapping=torch.zeros(1 + num_few, dtype=torch.int64),
    )
    return torch.zeros(1 + num_few, dtype=torch.int64), metadata


class _AllOptions:
    """Chooses tokens for as many rows as there may be requests, all of which ask for all that can be asked for."""

    def __init__(self, sampler: Sampler, config: EngineConfig, device: Device) -> None:
        """Take what stays on the device: counts and masks of all rows."""
        self.sampler, self.device = sampler, device
        num_rows = self.num_rows = config.scheduler.max_num_seqs
        self.states = RequestStates(num_rows, 1, 1, num_rows * (config.scheduler.max_steps_in_flight - 1))
        self.edits = LogitsEdits(self.states, sampler, device)
        every_token = msgspec.structs.replace(ALL_OPTIONS, allowed_token_ids=tuple(range(sampler.vocab_size)))
        for index in range(num_rows):  # one with a mask, because masks of all rows take the same memory
            params = ALL_OPTIONS if index else every_token
            self.edits.assign(self.states.assign(NewRequest(f"{index}", [0], [], params, [], 0)))

    def draw(self, logits: torch.Tensor) -> None:
        """Draw a token for each row of `logits`, fp32 [num_rows, vocab_size]."""
        rows = np.arange(self.num_rows)
        sampled = SamplingRows(self.states.sampling, rows, np.zeros_like(rows))
        arrays = self.sampler.prepare(sampled)._asdict() | self.edits.prepare(sampled)._asdict() | {REPORTING: rows}
        tensors = {
            name: torch.from_numpy(array).to(self.device.torch_device)
            for name, array in arrays.items()
            if array is not None
        }
        last_token_ids = torch.zeros(self.states.num_rows, dtype=torch.int64, device=self.device.torch_device)
        draw_tokens(logits, tensors, MAX_NUM_LOGPROBS, last_token_ids, self.sampler, self.edits)


class _LayerRun:
    """Runs steps through the first layer, over a cache of zeros."""

    def __init__(self, model: LlamaForCausalLM, config: EngineConfig, kv_dtype: torch.dtype, device: Device) -> None:
        self.model = model
        self.device = device
        block_size = config.cache.block_size
        num_blocks = math.ceil(config.scheduler.max_num_batched_tokens / block_size)
        shape = kv_cache_shape(model.kv_shape._replace(num_layers=1), num_blocks, block_size, kv_dtype)
        # Zeroed in place, which takes its memory from the system before anything is measured.
        self.kv_cache = torch.empty(shape, dtype=kv_dtype, device=device.torch_device).zero_()
        self.duration_s = 0.0  # of the last step

    def step(self, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Run one step, given in host memory, to its end; return [T, hidden_size]."""
        plan = plan_attention(metadata.query_start_loc.diff().numpy(), metadata.seq_lens.numpy(), self.model.heads)
        metadata = AttentionMetadata(*(self._on_device(tensor) for tensor in metadata[:4]))
        if plan is not None:
            plan = plan.to(self.device.torch_device)
        positions = self._on_device(positions)
        self.device.synchronize()
        started_s = time.perf_counter()
        hidden = self.model(torch.zeros_like(positions), positions, self.kv_cache, metadata._replace(plan=plan))
        self.device.synchronize()
        self.duration_s = time.perf_counter() - started_s
        return hidden

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device.torch_device)


def _find_prompt_logprobs(model: LlamaForCausalLM, hidden: torch.Tensor) -> None:
    """`hidden` [T, hidden_size] of a prompt; as many rows as ever go through the head together."""
    rows = torch.zeros(ROWS_AT_A_TIME, dtype=torch.int64, device=hidden.device)
    find_logprobs(model.compute_logits, hidden, {HIDDEN_ROWS: rows, NEXT_TOKENS: rows}, MAX_NUM_LOGPROBS)


@torch.inference_mode()
def measure_largest_step(
    model: LlamaForCausalLM, sampler: Sampler, config: EngineConfig, kv_dtype: torch.dtype, device: Device
) -> LargestStep:
    """Run the largest step and return what it costs; raises StartupError(OUT_OF_MEMORY). All ranks have to call it."""
    positions, metadata = largest_inputs(config)
    max_num_seqs = config.scheduler.max_num_seqs

    def run() -> None:
        hidden = layer.step(positions, metadata)
        logits = model.compute_logits(hidden[:1].repeat(max_num_seqs, 1))
        if logits is not None:
            _AllOptions(sampler, config, device).draw(logits)
        del logits
        _find_prompt_logprobs(model, hidden)

    with explain_out_of_memory("the largest step", None, LOWER_STEP_SIZE):
        layer = _LayerRun(model, config, kv_dtype, device)
        num_bytes = device.measure_peak_bytes(run)
    is_short = layer.duration_s / 2 <= MAX_SECOND_RUN_S  # half the context takes half the time, if it is long
    if _rank_0_says(model.group, device.has_graphs or is_short, device):
        longest_chunk = metadata.query_start_loc.diff().max()
        layer.step(positions, metadata._replace(seq_lens=torch.maximum(metadata.seq_lens // 2, longest_chunk)))
    tokens_per_s = len(positions) / (layer.duration_s * model.kv_shape.num_layers)
    if device.has_graphs:
        layer.step(*mixed_inputs(config))
        decode = decode_inputs(config, max_num_seqs, config.model.max_model_len)
        num_bytes = max(num_bytes, device.measure_peak_bytes(lambda: layer.step(*decode)))
    return LargestStep(num_bytes, tokens_per_s, _graph_bytes(layer, config, device))


def _rank_0_says(group: TensorParallelGroup, decision: bool, device: Device) -> bool:
    """Return what rank 0 decided: the ranks' clocks differ, but all have to run the same collectives."""
    return bool(group.broadcast(torch.full((1,), int(decision), device=device.torch_device)).item())


def _graph_bytes(layer: _LayerRun, config: EngineConfig, device: Device) -> int:
    """Estimate from the largest decode step, whose requests have as many tokens as the memory could hold at most."""
    if not device.has_graphs or config.parallel.enforce_eager:
        return 0
    sizes = graph_sizes(config.scheduler.max_num_seqs)
    shape, block_size = layer.model.kv_shape, config.cache.block_size
    num_slots = device.free_bytes() // block_num_bytes(shape, block_size, layer.kv_cache.dtype) * block_size
    num_tokens = min(config.model.max_model_len, max(1, num_slots // sizes[-1]))
    inputs = decode_inputs(config, sizes[-1], num_tokens)
    return device.measure_peak_bytes(lambda: layer.step(*inputs)) + len(sizes) * GRAPH_NUM_BYTES
