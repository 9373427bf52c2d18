"""Sampling on a GPU: one launch, one program per row, nothing sorted, nothing read back by the host.

A row's weights, exp((logit - maximum) / temperature), are at most 1 and not negative, so that their bits as an integer,
their key, order them. What top_k and top_p keep is then a lowest key and, of the tokens with just that key, the first
few. That key is searched for: a pass over the row counts and adds up the weights at or above three keys, which narrows
the interval to a quarter; it ends when no other key can change the answer: after 3 to 12 passes for 128,256 normal
logits with a deviation of 2 to 5, and after about 16 for equals at the cut. Weights are made anew in every pass: a row
of logits stays in the L2 cache, and one exponential costs less than a second row of memory.

Rows pay for what they ask, as in the reference: a greedy row for one pass, a plain one for two. The draw adds up blocks
in float64 in id order, then looks into the block that the random number is in.

The token is the reference's, unless the random number, or top_p, is within rounding of a boundary between two tokens:
weights are fp32 here and there but of another exponential (some 1e-7 apart), and the sums that top_p is compared with
are kept in fp32 per lane. A row's result depends on that row alone, to the bit.

Options that are absent are a flag at run time, and their pointers stand in for them: a kernel of its own for every
combination would be compiled in the middle of serving. Rejected: sorting; gathering candidates first, which is faster
only when they are enough and needs this search when they are not; rejection sampling, which takes a random number of
random numbers; several programs per row, which costs a launch per pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.ops import sampling
from octavo.kernels.ops.sampling import sample_tokens
from octavo.kernels.registry import backend
from octavo.kernels.triton.rows import with_adjacent_elements

BLOCK_TOKENS = 4096
NUM_WARPS = 16

INVALID_TOKEN_ID = tl.constexpr(sampling.INVALID_TOKEN_ID)
LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
HIGHEST_KEY = tl.constexpr(0x3F800000)  # of the weight 1
LOWEST_KEY = tl.constexpr(1)  # of the smallest positive weight


@triton.jit
def load_weights(row_ptr, token_ids, vocab_size, maximum, scale):
    """Weights of some tokens of a row; those past the vocabulary weigh nothing."""
    logits = tl.load(row_ptr + token_ids, mask=token_ids < vocab_size, other=-INFINITY)
    return tl.exp2((logits - maximum) * scale)


@triton.jit
def find_maximum(row_ptr, vocab_size, block_tokens: tl.constexpr):
    """Return the largest logit, the lowest id that has it, and whether the row is a distribution."""
    lanes = tl.arange(0, block_tokens)
    best = tl.full([block_tokens], -INFINITY, tl.float32)
    best_ids = tl.zeros([block_tokens], tl.int32)
    num_nans = tl.zeros([block_tokens], tl.int32)
    for first in tl.range(0, vocab_size, block_tokens):
        token_ids = first + lanes
        logits = tl.load(row_ptr + token_ids, mask=token_ids < vocab_size, other=-INFINITY)
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        best_ids = tl.where(is_better, token_ids, best_ids)
        num_nans += (logits != logits).to(tl.int32)
    maximum = tl.max(best, 0)
    token_id = tl.min(tl.where(best == maximum, best_ids, vocab_size), 0)
    is_valid = (maximum > -INFINITY) & (maximum < INFINITY) & (tl.sum(num_nans, 0) == 0)
    return maximum, token_id, is_valid


@triton.jit
def measure(row_ptr, vocab_size, maximum, scale, key_1, key_2, key_3, block_tokens: tl.constexpr):
    """Return how many tokens are at or above each of three keys, and what they weigh (float64)."""
    lanes = tl.arange(0, block_tokens)
    num_1 = tl.zeros([block_tokens], tl.int32)
    num_2 = tl.zeros([block_tokens], tl.int32)
    num_3 = tl.zeros([block_tokens], tl.int32)
    mass_1 = tl.zeros([block_tokens], tl.float32)
    mass_2 = tl.zeros([block_tokens], tl.float32)
    mass_3 = tl.zeros([block_tokens], tl.float32)
    for first in tl.range(0, vocab_size, block_tokens):
        weights = load_weights(row_ptr, first + lanes, vocab_size, maximum, scale)
        keys = weights.to(tl.int32, bitcast=True)
        num_1 += (keys >= key_1).to(tl.int32)
        num_2 += (keys >= key_2).to(tl.int32)
        num_3 += (keys >= key_3).to(tl.int32)
        mass_1 += tl.where(keys >= key_1, weights, 0.0)
        mass_2 += tl.where(keys >= key_2, weights, 0.0)
        mass_3 += tl.where(keys >= key_3, weights, 0.0)
    return (
        tl.sum(num_1, 0),
        tl.sum(num_2, 0),
        tl.sum(num_3, 0),
        tl.sum(mass_1.to(tl.float64), 0),
        tl.sum(mass_2.to(tl.float64), 0),
        tl.sum(mass_3.to(tl.float64), 0),
    )


@triton.jit
def search(
    row_ptr,
    vocab_size,
    maximum,
    scale,
    low,
    num_low,
    mass_low,
    target,
    by_mass: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """Find the highest key at or above which there are `target` tokens, or with by_mass tokens that weigh `target`.

    At and above `low` there are more than enough, of `num_low` and `mass_low`; at and above `high` there are too few.
    The search ends when they are neighbours, or when any key between them keeps the same tokens. Between close bounds
    the last of the three keys may reach `high` or pass it, where there are too few anyway.

    Returns:
        low, num_low, mass_low; num_high, mass_high; and whether low is the very key that was sought.
    """
    high = HIGHEST_KEY + 1
    num_high = 0
    mass_high = tl.full([], 0.0, tl.float64)
    is_open = num_low > 1
    while is_open:
        quarter = tl.maximum((high - low) // 4, 1)
        key_1 = low + quarter
        key_2 = key_1 + quarter
        key_3 = key_2 + quarter
        num_1, num_2, num_3, mass_1, mass_2, mass_3 = measure(
            row_ptr, vocab_size, maximum, scale, key_1, key_2, key_3, block_tokens
        )
        if by_mass:
            is_enough_1 = mass_1 >= target
            is_enough_2 = mass_2 >= target
            is_enough_3 = mass_3 >= target
        else:
            is_enough_1 = num_1 >= target
            is_enough_2 = num_2 >= target
            is_enough_3 = num_3 >= target
        if is_enough_3:
            low = key_3
            num_low = num_3
            mass_low = mass_3
        elif is_enough_2:
            low = key_2
            num_low = num_2
            mass_low = mass_2
            high = key_3
            num_high = num_3
            mass_high = mass_3
        elif is_enough_1:
            low = key_1
            num_low = num_1
            mass_low = mass_1
            high = key_2
            num_high = num_2
            mass_high = mass_2
        else:
            high = key_1
            num_high = num_1
            mass_high = mass_1
        is_open = (low + 1 < high) & (num_low - num_high > 1 if by_mass else num_low > target)
    return low, num_low, mass_low, num_high, mass_high, low + 1 == high


@triton.jit
def find_cut(row_ptr, vocab_size, maximum, scale, min_p, top_k, top_p, block_tokens: tl.constexpr):
    """Return the lowest key that is kept, and how many of the tokens with just that key are: vocab_size for all."""
    low = tl.maximum(min_p.to(tl.int32, bitcast=True), LOWEST_KEY)
    num_equal_kept = vocab_size
    if (top_k < vocab_size) | (top_p < 1.0):
        num_low, _, _, mass_low, _, _ = measure(row_ptr, vocab_size, maximum, scale, low, low, low, block_tokens)
        num_excess = 0
        if top_k < num_low:
            low, num_low, mass_low, num_high, _, is_exact = search(
                row_ptr, vocab_size, maximum, scale, low, num_low, mass_low, top_k, False, block_tokens
            )
            num_excess = num_low - top_k
            if num_excess > 0:
                num_equal_kept = top_k - num_high
                mass_low -= num_excess * low.to(tl.float32, bitcast=True).to(tl.float64)
        if top_p < 1.0:
            low_of_k = low
            target = top_p * mass_low
            low, num_low, mass_low, num_high, mass_high, is_exact = search(
                row_ptr, vocab_size, maximum, scale, low, num_low, mass_low, target, True, block_tokens
            )
            num_equal = num_low - num_high
            num_allowed = tl.where(low == low_of_k, num_equal - num_excess, num_equal)
            weight = low.to(tl.float32, bitcast=True).to(tl.float64)
            num_needed = tl.ceil(tl.minimum((target - mass_high) / weight, num_allowed.to(tl.float64))).to(tl.int32)
            num_equal_kept = tl.where(is_exact, tl.maximum(num_needed, 1), vocab_size)
    return low, num_equal_kept


@triton.jit
def load_kept(row_ptr, token_ids, vocab_size, maximum, scale, low, num_equal_kept, num_equal_before):
    """Return float64 weights of some tokens, zero if left out, and how many tokens so far have the lowest key."""
    weights = load_weights(row_ptr, token_ids, vocab_size, maximum, scale)
    keys = weights.to(tl.int32, bitcast=True)
    kept = tl.where(keys >= low, weights, 0.0)
    if num_equal_kept < vocab_size:
        is_equal = (keys == low).to(tl.int32)
        rank = num_equal_before + tl.cumsum(is_equal, 0)
        kept = tl.where((is_equal != 0) & (rank > num_equal_kept), 0.0, kept)
        num_equal_before += tl.sum(is_equal, 0)
    return kept.to(tl.float64), num_equal_before


@triton.jit
def draw(
    row_ptr,
    vocab_size,
    maximum,
    scale,
    low,
    num_equal_kept,
    uniform,
    block_tokens: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """Return the first token at which the running sum of the kept weights exceeds uniform · their total."""
    lanes = tl.arange(0, block_tokens)
    blocks = tl.arange(0, num_blocks)
    ends = tl.full([num_blocks], INFINITY, tl.float64)  # running sums after each block
    nums_equal = tl.zeros([num_blocks], tl.int32)  # tokens with the lowest key before each block
    total = tl.full([], 0.0, tl.float64)
    num_equal = 0
    for block in tl.range(0, tl.cdiv(vocab_size, block_tokens)):
        nums_equal = tl.where(blocks == block, num_equal, nums_equal)
        kept, num_equal = load_kept(
            row_ptr, block * block_tokens + lanes, vocab_size, maximum, scale, low, num_equal_kept, num_equal
        )
        total += tl.sum(kept, 0)
        ends = tl.where(blocks == block, total, ends)

    target = uniform * total
    block = tl.sum((ends <= target).to(tl.int32), 0)
    before = tl.max(tl.where(blocks < block, ends, 0.0), 0)
    token_ids = block * block_tokens + lanes
    kept, _ = load_kept(
        row_ptr,
        token_ids,
        vocab_size,
        maximum,
        scale,
        low,
        num_equal_kept,
        tl.sum(tl.where(blocks == block, nums_equal, 0), 0),
    )
    is_past = (before + tl.cumsum(kept, 0) > target) & (kept > 0.0)
    token_id = tl.min(tl.where(is_past, token_ids, vocab_size), 0)
    # Rounded in another order, the block's own sum may fall short of the target.
    last = tl.max(tl.where(kept > 0.0, token_ids, 0), 0)
    return tl.minimum(token_id, last)


OPTIONS = ("temperatures_ptr", "top_ks_ptr", "top_ps_ptr", "min_ps_ptr", "uniforms_ptr")
FLAGS = ("has_top_ks", "has_top_ps", "has_min_ps")


@triton.jit(do_not_specialize=FLAGS, do_not_specialize_on_alignment=OPTIONS)
def sample_kernel(
    token_ids_ptr,  # int64 [num_rows]
    logits_ptr,  # fp32 [num_rows, vocab_size], stride given
    temperatures_ptr,  # fp32 [num_rows]
    top_ks_ptr,  # int64 [num_rows]
    top_ps_ptr,  # float64 [num_rows]
    min_ps_ptr,  # fp32 [num_rows]
    uniforms_ptr,  # float64 [num_rows]
    has_top_ks,  # 0: top_ks_ptr is a stand-in, as for the next two
    has_top_ps,
    has_min_ps,
    row_stride,
    vocab_size,
    block_tokens: tl.constexpr,
    num_blocks: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    maximum, token_id, is_valid = find_maximum(row_ptr, vocab_size, block_tokens)
    temperature = tl.load(temperatures_ptr + row)
    if is_valid & (temperature > 0.0):
        # At a tiny temperature infinity would make the maximum's own weight 0 · infinity.
        scale = tl.minimum(1.0 / temperature * LOG2_E, LARGEST_FLOAT)
        min_p = tl.load(min_ps_ptr + row, mask=has_min_ps != 0, other=0.0)
        top_p = tl.load(top_ps_ptr + row, mask=has_top_ps != 0, other=1.0)
        top_k = tl.load(top_ks_ptr + row, mask=has_top_ks != 0, other=0)
        top_k = tl.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k).to(tl.int32)
        low, num_equal_kept = find_cut(row_ptr, vocab_size, maximum, scale, min_p, top_k, top_p, block_tokens)
        uniform = tl.load(uniforms_ptr + row)
        token_id = draw(row_ptr, vocab_size, maximum, scale, low, num_equal_kept, uniform, block_tokens, num_blocks)
    tl.store(token_ids_ptr + row, tl.where(is_valid, token_id, INVALID_TOKEN_ID).to(tl.int64))


@backend("triton", implements=sample_tokens)
def triton_sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    logits = with_adjacent_elements(logits)
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    block = min(BLOCK_TOKENS, triton.next_power_of_2(vocab_size))
    sample_kernel[(num_rows,)](
        token_ids,
        logits,
        temperatures,
        token_ids if top_ks is None else top_ks,
        uniforms if top_ps is None else top_ps,
        temperatures if min_ps is None else min_ps,
        uniforms,
        int(top_ks is not None),
        int(top_ps is not None),
        int(min_ps is not None),
        logits.stride(0),
        vocab_size,
        block_tokens=block,
        num_blocks=triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        num_warps=NUM_WARPS,
    )
    return token_ids
