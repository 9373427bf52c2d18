"""Rotary position embedding on a GPU: query and key in one launch, read where they lie in the fused projection.

A program turns some heads of one token: heads of the query first, then those of the key. Elements past rotary_dim are
copied. Rejected: turning in place, which saves no traffic and changes an argument.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.ops.rotary import rotary
from octavo.kernels.registry import backend
from octavo.kernels.triton.rows import with_adjacent_elements

MAX_TILE_HEADS = 8


@triton.jit
def turn_heads(
    heads_ptr,  # one token's [num_heads, head_dim]
    result_ptr,  # the same, contiguous
    head_stride,
    num_heads,
    first_head,
    cos,
    sin,
    half: tl.constexpr,
    head_dim: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
    tile_rest: tl.constexpr,
):
    heads = first_head + tl.arange(0, tile_heads)
    pairs = tl.arange(0, tile_half)
    is_inside = (heads < num_heads)[:, None] & (pairs < half)[None, :]
    places = (heads * head_stride)[:, None] + pairs[None, :]
    result_places = (heads * head_dim)[:, None] + pairs[None, :]
    first = tl.load(heads_ptr + places, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + places + half, mask=is_inside, other=0.0).to(tl.float32)
    dtype = result_ptr.dtype.element_ty
    tl.store(result_ptr + result_places, (first * cos - second * sin).to(dtype), mask=is_inside)
    tl.store(result_ptr + result_places + half, (second * cos + first * sin).to(dtype), mask=is_inside)
    if tile_rest > 0:
        rest = 2 * half + tl.arange(0, tile_rest)
        is_rest = (heads < num_heads)[:, None] & (rest < head_dim)[None, :]
        kept = tl.load(heads_ptr + (heads * head_stride)[:, None] + rest[None, :], mask=is_rest)
        tl.store(result_ptr + (heads * head_dim)[:, None] + rest[None, :], kept, mask=is_rest)


@triton.jit
def rotary_kernel(
    query_ptr,  # [num_tokens, num_query_heads, head_dim], strides given
    key_ptr,  # [num_tokens, num_kv_heads, head_dim], strides given
    turned_query_ptr,  # contiguous, as the next
    turned_key_ptr,
    positions_ptr,  # int64 [num_tokens]
    cos_sin_ptr,  # fp32 [max_position, 2 * half]
    num_query_heads,
    num_kv_heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_sin_stride,
    half: tl.constexpr,
    head_dim: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
    tile_rest: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_query_tiles = tl.cdiv(num_query_heads, tile_heads)
    pairs = tl.arange(0, tile_half)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride
    cos = tl.load(angles_ptr + pairs, mask=pairs < half, other=0.0)[None, :]
    sin = tl.load(angles_ptr + half + pairs, mask=pairs < half, other=0.0)[None, :]
    if tile < num_query_tiles:
        turn_heads(
            query_ptr + token * query_token_stride,
            turned_query_ptr + token * num_query_heads * head_dim,
            query_head_stride,
            num_query_heads,
            tile * tile_heads,
            cos,
            sin,
            half,
            head_dim,
            tile_heads,
            tile_half,
            tile_rest,
        )
    else:
        turn_heads(
            key_ptr + token * key_token_stride,
            turned_key_ptr + token * num_kv_heads * head_dim,
            key_head_stride,
            num_kv_heads,
            (tile - num_query_tiles) * tile_heads,
            cos,
            sin,
            half,
            head_dim,
            tile_heads,
            tile_half,
            tile_rest,
        )


@backend("triton", implements=rotary)
def triton_rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = with_adjacent_elements(query), with_adjacent_elements(key)
    cos_sin = with_adjacent_elements(cos_sin)
    turned_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    turned_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads, half = key.shape[1], cos_sin.shape[1] // 2
    tile_heads = min(MAX_TILE_HEADS, triton.next_power_of_2(max(num_query_heads, num_kv_heads)))
    num_rest = head_dim - 2 * half
    num_tiles = triton.cdiv(num_query_heads, tile_heads) + triton.cdiv(num_kv_heads, tile_heads)
    rotary_kernel[(num_tokens, num_tiles)](
        query,
        key,
        turned_query,
        turned_key,
        positions.contiguous(),
        cos_sin,
        num_query_heads,
        num_kv_heads,
        *query.stride()[:2],
        *key.stride()[:2],
        cos_sin.stride(0),
        half=half,
        head_dim=head_dim,
        tile_heads=tile_heads,
        tile_half=triton.next_power_of_2(half),
        tile_rest=triton.next_power_of_2(num_rest) if num_rest else 0,
        num_warps=2,
    )
    return turned_query, turned_key
