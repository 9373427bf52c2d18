"""Random numbers on a GPU: Triton's Philox-4x32-10, whose words are those of the reference, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.registry import backend

TILE_ROWS = 128
TWO_TO_MINUS_53 = tl.constexpr(2.0**-53)


@triton.jit(do_not_specialize=["num_rows"])
def philox_uniform_kernel(
    uniforms_ptr,  # float64 [num_rows]
    seeds_ptr,  # int64 [num_rows], as the next three
    choice_indices_ptr,
    positions_ptr,
    draws_ptr,
    num_rows,
    tile_rows: tl.constexpr,
):
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    is_inside = rows < num_rows
    seeds = tl.load(seeds_ptr + rows, mask=is_inside, other=0)
    choice_indices = tl.load(choice_indices_ptr + rows, mask=is_inside, other=0).to(tl.uint32)
    positions = tl.load(positions_ptr + rows, mask=is_inside, other=0).to(tl.uint32)
    draws = tl.load(draws_ptr + rows, mask=is_inside, other=0).to(tl.uint32)
    first, second, _, _ = tl.philox(seeds, choice_indices, positions, draws, tl.zeros_like(draws))
    bits = (first.to(tl.uint64) << 21) | (second.to(tl.uint64) >> 11)
    tl.store(uniforms_ptr + rows, bits.to(tl.int64).to(tl.float64) * TWO_TO_MINUS_53, mask=is_inside)


@backend("triton", implements=philox_uniform)
def triton_philox_uniform(
    seeds: torch.Tensor, choice_indices: torch.Tensor, positions: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    uniforms = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    columns = (each.contiguous() for each in (seeds, choice_indices, positions, draws))
    num_rows = seeds.shape[0]
    philox_uniform_kernel[(triton.cdiv(num_rows, TILE_ROWS),)](
        uniforms, *columns, num_rows, tile_rows=TILE_ROWS, num_warps=4
    )
    return uniforms
