"""Steps of attention_cases with their cache as the CPU kernels hold it, written through the kernel that writes KV."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attention_cases import FP8_SCALES, Case, Options, Step, build, options_of

from octavo.kernels.cpu.attention import cpu_paged_attention
from octavo.kernels.cpu.kv_cache import cpu_write_kv
from octavo.kernels.ops.kv_formats import FP8_DTYPE, from_int8, kv_vector_size, to_int8

SCALE = 0.2


class CpuStep(NamedTuple):
    """What the kernel gets, and the same step with the numbers that are in its cache, as the reference holds them."""

    step: Step
    plain: Step
    options: Options


def slots_of(step: Step, row: int, tokens: torch.Tensor) -> torch.Tensor:
    block_size = step.kv_cache.shape[2]
    return step.block_tables[row, tokens // block_size].long() * block_size + tokens % block_size


def poisoned(step: Step, dtype: torch.dtype) -> torch.Tensor:
    """A cache of which every byte is such that no number of it may be read."""
    shape = list(step.kv_cache.shape)
    shape[4] = kv_vector_size(dtype, shape[4])
    return torch.empty(shape, dtype=dtype).view(torch.uint8).fill_(0xFF).view(dtype)


def build_for_cpu(case: Case, is_int8: bool = False) -> CpuStep:
    """Build the step of `case`; with `is_int8`, its cache is int8, and `plain` has what that holds."""
    plain, options = build(case), options_of(case)
    if is_int8:
        rounded = from_int8(to_int8(plain.kv_cache.float()))
        plain = plain._replace(kv_cache=torch.where(plain.kv_cache.isnan(), torch.nan, rounded))
    kv_cache = poisoned(plain, torch.int8 if is_int8 else plain.kv_cache.dtype)
    for row, seq_len in enumerate(case.seq_lens):
        first_seen = 0 if case.window is None else max(0, seq_len - case.query_lens[row] - case.window + 1)
        write_tokens(plain, kv_cache, row, first_seen, seq_len, case.dtype, options)
    return CpuStep(plain._replace(kv_cache=kv_cache), plain, options)


def write_tokens(
    plain: Step, kv_cache: torch.Tensor, row: int, first: int, end: int, dtype: torch.dtype, options: Options
) -> None:
    """Write the keys and values of some tokens of a request, which `plain` has, into `kv_cache`."""
    slots = slots_of(plain, row, torch.arange(first, end))
    vectors = plain.kv_cache.float().flatten(1, 2)[:, slots]
    if plain.kv_cache.dtype is FP8_DTYPE:
        vectors = vectors * torch.tensor(FP8_SCALES)[:, None, None, None]
        dtype = torch.float32  # so that what is stored is again the number that it was
    key, value = vectors.to(dtype).contiguous()
    cpu_write_kv(key, value, kv_cache, slots, options.kv_scales)


def attend(step: Step, options: Options) -> torch.Tensor:
    return cpu_paged_attention(*step, SCALE, **options._asdict())
