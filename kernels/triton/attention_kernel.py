"""The kernels of paged attention: one over ragged queries, and one that joins partial results.

A work item is a tile of queries of one request, all query heads of one KV head side by side in it, against a range of
the request's keys. Keys are taken in tiles that start at multiples of TILE_KEYS from the request's start, joined by the
online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023); splits of the keys follow Flash-Decoding (Dao
et al. 2023). Programs stride through the items and stop at the first of padding, so that a grid of fixed size, as a
graph has it, costs nothing for items that a step does not have.

Invariant: a key tile that a query may not see leaves its sums as they are to the bit, and so does a split. Every
product that is added to is an explicit `fma`, so that a compiler's choice of where to contract cannot make two of the
loops round differently. Slots that no query of the tile sees are not read. Numbers of the cache are only computed with
in fp32 or by `tl.dot`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.kv_fp8 import decode_fp8

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _soft_cap(scores, factor, soft_cap):
    """Return soft_cap · tanh(scores · factor)."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (factor * 2.0 * LOG2_E)) + 1.0))


@triton.jit
def _finite(maximum):
    """Return `maximum`, and 0 where no key was seen, so that a difference of two infinities cannot arise."""
    return tl.where(maximum == NOTHING, 0.0, maximum)


@triton.jit
def _load_vectors(vectors, places, dims, is_readable, dtype, HEAD_DIM: tl.constexpr, IS_MASKED: tl.constexpr):
    """Return [TILE_KEYS, padded head_dim] of keys or values in the dtype of the query; zeros where not readable."""
    pointers = vectors + places[:, None] + dims[None, :]
    is_padded: tl.constexpr = dims.shape[0] != HEAD_DIM
    if IS_MASKED and is_padded:
        loaded = tl.load(pointers, mask=is_readable[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    elif IS_MASKED:
        loaded = tl.load(pointers, mask=is_readable[:, None], other=0)
    elif is_padded:
        loaded = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0)
    else:
        loaded = tl.load(pointers)
    return decode_fp8(loaded).to(dtype) if loaded.dtype == tl.uint8 else loaded


@triton.jit
def _attend_tile(
    state,  # (maximum of the scores, sum of the weights, weighted sum of the values), of each row
    queries,  # (query vectors, their positions)
    first_key,
    seen,  # (first key that any query sees, key after the last)
    cache,  # (block table of the request, keys of the KV head, its values, stride of blocks, of slots)
    factors,  # (of the scores in the soft cap, of the scores in exp2, soft cap, window, scale of the values)
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take one tile of keys into the state; unmasked where every query sees every key of it."""
    maximum, total, weighted = state
    query, positions = queries
    block_table, keys, values, block_stride, slot_stride = cache
    cap_factor, exponent_factor, soft_cap, window, _ = factors
    key_positions = first_key + tl.arange(0, TILE_KEYS)
    is_readable = (key_positions >= seen[0]) & (key_positions < seen[1])
    if IS_MASKED:
        blocks = tl.load(block_table + key_positions // BLOCK_SIZE, mask=is_readable, other=0)
    else:
        blocks = tl.load(block_table + key_positions // BLOCK_SIZE)
    places = blocks.to(tl.int64) * block_stride + (key_positions % BLOCK_SIZE) * slot_stride
    dims = tl.arange(0, query.shape[1])
    key = _load_vectors(keys, places, dims, is_readable, query.dtype, HEAD_DIM, IS_MASKED)
    value = _load_vectors(values, places, dims, is_readable, query.dtype, HEAD_DIM, IS_MASKED)

    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HAS_SOFT_CAP:
        scores = _soft_cap(scores, cap_factor, soft_cap)
    if IS_MASKED:
        is_seen = is_readable[None, :] & (key_positions[None, :] <= positions[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (key_positions[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, NOTHING)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = _finite(new_maximum)
    decay = tl.exp2((maximum - base) * exponent_factor)
    weights = tl.exp2(tl.fma(scores, exponent_factor, -(base * exponent_factor)[:, None]))
    total = tl.fma(total, decay, tl.sum(weights, 1))
    weighted = tl.dot(weights.to(query.dtype), value, weighted * decay[:, None], input_precision="ieee")
    return new_maximum, total, weighted


@triton.jit
def _attend_range(
    queries,
    ends,  # (position of the first query, of the last)
    first_key,
    seen,
    cache,
    factors,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Attend to the seen keys from `first_key`, a multiple of TILE_KEYS, on.

    Returns the attended values, fp32 [TILE_ROWS, padded head_dim], and the base-2 logarithm of the sum of exp(score);
    0 and -inf for a row that sees none of the keys.
    """
    query, _ = queries
    state = (
        tl.full([query.shape[0]], NOTHING, tl.float32),
        tl.zeros([query.shape[0]], tl.float32),
        tl.zeros([query.shape[0], query.shape[1]], tl.float32),
    )
    full_key = first_key
    if HAS_WINDOW:
        first_key = tl.maximum(first_key, seen[0] // TILE_KEYS * TILE_KEYS)
        seen_by_all = tl.maximum(ends[1] - factors[3] + 1, first_key)
        full_key = tl.minimum(tl.cdiv(seen_by_all, TILE_KEYS) * TILE_KEYS, seen[1])
        for key in tl.range(first_key, full_key, TILE_KEYS):
            state = _attend_tile(
                state, queries, key, seen, cache, factors, HEAD_DIM, TILE_KEYS, BLOCK_SIZE, True, HAS_SOFT_CAP, True
            )
    num_full_keys = tl.maximum(tl.minimum(seen[1], ends[0] + 1) - full_key, 0) // TILE_KEYS * TILE_KEYS
    for key in tl.range(full_key, full_key + num_full_keys, TILE_KEYS):
        state = _attend_tile(
            state, queries, key, seen, cache, factors, HEAD_DIM, TILE_KEYS, BLOCK_SIZE, False, HAS_SOFT_CAP, False
        )
    for key in tl.range(full_key + num_full_keys, seen[1], TILE_KEYS):
        state = _attend_tile(
            state, queries, key, seen, cache, factors, HEAD_DIM, TILE_KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, True
        )
    maximum, total, weighted = state
    has_keys = total > 0.0
    divisor = tl.where(has_keys, total, 1.0)
    log_sum = tl.where(has_keys, tl.fma(maximum, factors[1], tl.log2(divisor)), NOTHING)
    return weighted / divisor[:, None] * factors[4], log_sum


@triton.jit
def _merge(merged, attended, log_sum):
    """Join a split's result to those before it; `merged` is (maximum of the log sums, sum, weighted sum)."""
    maximum, total, weighted = merged
    new_maximum = tl.maximum(maximum, log_sum)
    base = _finite(new_maximum)
    decay = tl.exp2(maximum - base)
    weight = tl.exp2(log_sum - base)
    weighted = tl.fma(weighted, decay[:, None], attended * weight[:, None])
    return new_maximum, tl.fma(total, decay, weight), weighted


@triton.jit
def _finish(merged):
    """Return the result of all merged splits and its base-2 log sum; those of a single split as they were.

    That a quotient by 1 and the logarithm of 1 are exact is not left to instructions that are allowed to be off.
    """
    maximum, total, weighted = merged
    divisor = tl.where(total > 0.0, total, 1.0)
    attended = tl.where((divisor == 1.0)[:, None], weighted, weighted / divisor[:, None])
    return attended, maximum + tl.where(divisor == 1.0, 0.0, tl.log2(divisor))


@triton.jit
def _attend_splits(
    queries,
    ends,
    split,
    seen,
    cache,
    factors,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Attend to the seen keys from `split` on, one split after the other, joined as partial results are."""
    query, _ = queries
    merged = (
        tl.full([query.shape[0]], NOTHING, tl.float32),
        tl.zeros([query.shape[0]], tl.float32),
        tl.zeros([query.shape[0], query.shape[1]], tl.float32),
    )
    for first_key in tl.range(split * SPLIT_KEYS, seen[1], SPLIT_KEYS, num_stages=1):
        part = (seen[0], tl.minimum(first_key + SPLIT_KEYS, seen[1]))
        attended, log_sum = _attend_range(
            queries, ends, first_key, part, cache, factors, HEAD_DIM, TILE_KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP
        )
        merged = _merge(merged, attended, log_sum)
    return _finish(merged)


@triton.jit(do_not_specialize=["num_work", "window", "table_stride"])
def paged_attention_kernel(
    out_ptr,  # [num_tokens, num_query_heads, head_dim]
    partial_out_ptr,  # fp32 [num_partials, num_query_heads, head_dim]
    partial_log_sum_ptr,  # fp32 [num_partials, num_query_heads]
    query_ptr,  # [num_tokens, num_query_heads, head_dim]
    kv_cache_ptr,  # [2, num_blocks, block_size, num_kv_heads, head_dim]; uint8 for fp8
    work_ptr,  # int32 [num_work, 4]: request, first query, split of the keys, partial result (-1: none, all splits)
    query_start_loc_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    kv_scales_ptr,  # fp32 [2], or None
    scale,
    soft_cap,
    window,
    num_work,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    value_stride,  # from a key to its value
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MERGES: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    num_workers = tl.num_programs(0) // NUM_KV_HEADS
    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    heads = kv_head * GROUP + rows % GROUP
    keys = kv_cache_ptr + kv_head * kv_head_stride

    exponent_factor = scale
    value_scale = 1.0
    if kv_scales_ptr is not None:
        exponent_factor = scale * tl.load(kv_scales_ptr)
        value_scale = tl.load(kv_scales_ptr + 1)
    cap_factor = exponent_factor / soft_cap
    if HAS_SOFT_CAP:
        exponent_factor = 1.0
    factors = (cap_factor, exponent_factor * LOG2_E, soft_cap, window, value_scale)

    item = tl.program_id(0) // NUM_KV_HEADS
    request = tl.load(work_ptr + item * 4)
    while request >= 0:
        first_token = tl.load(work_ptr + item * 4 + 1)
        split = tl.load(work_ptr + item * 4 + 2)
        partial = tl.load(work_ptr + item * 4 + 3)
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        num_context = tl.load(seq_lens_ptr + request) - query_len

        tokens = first_token + rows // GROUP
        is_row = (tokens < query_len) & (rows < TILE_TOKENS * GROUP)
        query_places = (query_start + tokens).to(tl.int64) * query_token_stride + heads * query_head_stride
        is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        query = tl.load(query_ptr + query_places[:, None] + dims[None, :], mask=is_element, other=0.0)

        first_position = num_context + first_token
        last_position = num_context + tl.minimum(first_token + TILE_TOKENS, query_len) - 1
        lowest_key = 0
        if HAS_WINDOW:
            lowest_key = tl.maximum(first_position - window + 1, 0)
        end_key = last_position + 1
        if partial >= 0:
            end_key = tl.minimum(end_key, (split + 1) * SPLIT_KEYS)
        queries = (query, num_context + tokens)
        ends = (first_position, last_position)
        block_table = block_tables_ptr + request.to(tl.int64) * table_stride
        cache = (block_table, keys, keys + value_stride, block_stride, slot_stride)
        seen = (lowest_key, end_key)
        if MERGES:
            attended, log_sum = _attend_splits(
                queries, ends, split, seen, cache, factors,
                HEAD_DIM, TILE_KEYS, BLOCK_SIZE, SPLIT_KEYS, HAS_WINDOW, HAS_SOFT_CAP,
            )  # fmt: skip
        else:
            attended, log_sum = _attend_range(
                queries, ends, split * SPLIT_KEYS, seen, cache, factors,
                HEAD_DIM, TILE_KEYS, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP,
            )  # fmt: skip

        # Where results go is found again from memory, so that it takes no registers while keys are attended to.
        tokens = tl.load(work_ptr + item * 4 + 1, volatile=True) + rows // GROUP
        is_row = (tokens < query_len) & (rows < TILE_TOKENS * GROUP)
        is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        if partial < 0:
            out_places = (query_start + tokens).to(tl.int64) * out_token_stride + heads * out_head_stride
            result = attended.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_places[:, None] + dims[None, :], result, mask=is_element)
        else:
            partial_places = (partial + rows // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            tl.store(partial_log_sum_ptr + partial_places, log_sum, mask=is_row)
            tl.store(partial_out_ptr + partial_places[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_element)
        item += num_workers
        request = tl.load(work_ptr + item * 4, mask=item < num_work, other=-1)


@triton.jit
def attention_reduction_kernel(
    out_ptr,  # [num_tokens, num_query_heads, head_dim]
    partial_out_ptr,
    partial_log_sum_ptr,
    reductions_ptr,  # int32 [R, 4]: request, first query, first partial result, number of splits
    query_start_loc_ptr,
    out_token_stride,
    out_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PART_ROWS: tl.constexpr,  # of a tile, for each program
    NUM_STAGES: tl.constexpr,
):
    """Join the partial results of a tile's splits, in the order of the splits."""
    NUM_PARTS: tl.constexpr = TILE_ROWS // PART_ROWS
    part = tl.program_id(0) % NUM_PARTS
    kv_head = tl.program_id(0) // NUM_PARTS % NUM_KV_HEADS
    reduction = tl.program_id(0) // (NUM_PARTS * NUM_KV_HEADS)
    request = tl.load(reductions_ptr + reduction * 4)
    if request < 0:
        return
    first_token = tl.load(reductions_ptr + reduction * 4 + 1)
    first_partial = tl.load(reductions_ptr + reduction * 4 + 2)
    num_splits = tl.load(reductions_ptr + reduction * 4 + 3)
    query_start = tl.load(query_start_loc_ptr + request) + first_token
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    num_tokens = tl.minimum(tl.load(query_start_loc_ptr + request + 1) - query_start, TILE_TOKENS)
    if part * PART_ROWS >= num_tokens * GROUP:
        return
    rows = part * PART_ROWS + tl.arange(0, PART_ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    is_row = rows < num_tokens * GROUP
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    merged = (
        tl.full([PART_ROWS], NOTHING, tl.float32),
        tl.zeros([PART_ROWS], tl.float32),
        tl.zeros([PART_ROWS, PADDED_HEAD_DIM], tl.float32),
    )
    for split in tl.range(0, num_splits, num_stages=NUM_STAGES):
        partials = (first_partial + split * num_tokens + rows // GROUP).to(tl.int64)
        places = partials * (NUM_KV_HEADS * GROUP) + heads
        log_sum = tl.load(partial_log_sum_ptr + places, mask=is_row, other=NOTHING)
        attended = tl.load(partial_out_ptr + places[:, None] * HEAD_DIM + dims[None, :], mask=is_element, other=0.0)
        merged = _merge(merged, attended, log_sum)
    result, _ = _finish(merged)
    tokens = (query_start + rows // GROUP).to(tl.int64)
    out_places = tokens * out_token_stride + heads * out_head_stride
    tl.store(out_ptr + out_places[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=is_element)
