"""Every op of `octavo.kernels` as one late operation on a FakeGpu; attention keeps strictly to the plan of its step.

A plan names, in a row of work per request, the request, its queries and its tokens. What a plan does not name is not
computed: its rows come out as NaN. So an array that did not arrive, or padding that is taken for work, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fake_device import DeviceTensor

from octavo.kernels import registry
from octavo.kernels.ops.activation import silu_mul
from octavo.kernels.ops.attention import (
    AttentionPlan,
    PlanCapacity,
    copy_blocks,
    decode_plan_capacity,
    paged_attention,
    plan_attention,
    write_kv,
)
from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.linear import head_logits, linear
from octavo.kernels.ops.logits_edits import edit_logits
from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.rotary import rotary
from octavo.kernels.ops.sampling import sample_tokens
from octavo.kernels.ops.token_logprobs import token_logprobs
from octavo.kernels.registry import REFERENCE, Op, backend

NAME = "fake"
SPARE_WORK = 3  # rows beyond one per request


def like(tensor: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor.new_empty(shape, dtype=dtype or tensor.dtype)


def late(op: Op[..., Any], results: Callable[..., Any]) -> None:
    """Register a backend that queues the op's reference; `results` makes the tensors that it will fill."""
    reference = op.implementations[REFERENCE]

    @backend(NAME, implements=op)
    def queue(*args: Any, **kwargs: Any) -> Any:
        gpu = next((arg.gpu for arg in args if isinstance(arg, DeviceTensor)), None)
        if gpu is None:
            return reference(*args, **kwargs)
        into = results(*args, **kwargs)
        gpu.enqueue_call(reference, args, kwargs, into)
        return into


def _norms(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> Any:
    normed = like(x, *x.shape)
    return normed if residual is None else (normed, like(x, *x.shape))


def _candidates(
    logits: torch.Tensor,
    num_tokens: int,
    masked: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> Any:
    shape = (len(logits if rows is None else rows), min(num_tokens, logits.shape[1]))
    return like(logits, *shape, dtype=torch.int64), like(logits, *shape)


late(write_kv, lambda *args: None)
late(copy_blocks, lambda *args: None)
late(silu_mul, lambda gate_up: like(gate_up, *gate_up.shape[:-1], gate_up.shape[-1] // 2))
late(rms_norm, _norms)
late(rotary, lambda query, key, positions, cos_sin: (like(query, *query.shape), like(key, *key.shape)))
late(linear, lambda x, weight, bias=None: like(x, len(x), len(weight)))
late(head_logits, lambda hidden, weight, tile: like(hidden, len(hidden), len(weight), dtype=torch.float32))
late(philox_uniform, lambda seeds, *args: like(seeds, len(seeds), dtype=torch.float64))
late(sample_tokens, lambda logits, *args: like(logits, len(logits), dtype=torch.int64))
late(edit_logits, lambda *args: None)
late(token_logprobs, lambda logits, rows, token_ids: like(logits, len(rows)))
late(likeliest_tokens, _candidates)


@backend(NAME, implements=plan_attention)
def fake_plan(
    query_lens: np.ndarray, seq_lens: np.ndarray, heads: Any, window: int | None = None, tables: object = None
) -> AttentionPlan:
    """Wide requests first, as plans have them."""
    requests = np.argsort(query_lens == 1, kind="stable")
    work = np.zeros((len(requests), 4), np.int32)
    work[:, 0], work[:, 1], work[:, 2] = requests, query_lens[requests], seq_lens[requests]
    num_wide = int((query_lens > 1).sum())
    return AttentionPlan(torch.from_numpy(work), torch.from_numpy(work[:1].copy()), len(work), num_wide, 0)


@backend(NAME, implements=decode_plan_capacity)
def fake_capacity(num_requests: int, max_model_len: int, heads: Any, num_slots: int | None = None) -> PlanCapacity:
    num_work = max(1, num_requests + SPARE_WORK)
    return PlanCapacity(num_work, 2, num_work)


def _attend_by_plan(query, kv_cache, query_start_loc, seq_lens, block_tables, scale, work):
    result = torch.full_like(query, torch.nan)
    for request, num_queries, num_tokens, _ in work.tolist():
        if request == -1:
            continue
        first, last = query_start_loc[request : request + 2].tolist()
        if (last - first, seq_lens[request].item()) != (num_queries, num_tokens):
            raise AssertionError(f"the plan of request {request} is not that of this step")
        only = slice(request, request + 1)
        queries = torch.tensor([0, num_queries], dtype=torch.int32)
        reference = paged_attention.implementations[REFERENCE]
        tables = (seq_lens[only], block_tables[only])
        result[first:last] = reference(query[first:last].contiguous(), kv_cache, queries, *tables, scale)
    return result


@backend(NAME, implements=paged_attention)
def fake_attention(query, kv_cache, query_start_loc, seq_lens, block_tables, scale, out=None, *, plan, **options):
    """Attend as the plan on the device says when the operation runs."""
    del options
    into = like(query, *query.shape) if out is None else out
    args = (query, kv_cache, query_start_loc, seq_lens, block_tables, scale, plan.work)
    query.gpu.enqueue_call(_attend_by_plan, args, {}, into)
    return into


def select() -> dict[str, str]:
    """Have all ops run on the fake GPU; `registry.select()` takes it back."""
    return registry.select(NAME)
