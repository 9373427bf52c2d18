"""Prints, for each kernel of a layer and of the sampler, how often steps of different sizes make Triton compile it.

Triton compiles a kernel anew for each kind of number that it is given (1, a multiple of 16, any other) unless told not
to. A number that changes from step to step would then have kernels compiled in the middle of serving: seconds in which
everybody waits.
"""

from __future__ import annotations

import json
from collections import defaultdict

import torch
from aot_cases import SMOLLM2, attend
from aot_compile import compiled_launches
from aot_targets import TARGETS

import octavo.kernels.triton.backends  # noqa: F401 - registers the kernels
from octavo.kernels import registry
from octavo.kernels.ops.activation import silu_mul
from octavo.kernels.ops.attention import write_kv
from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.rotary import rotary
from octavo.kernels.ops.sampling import sample_tokens

# Queries and lengths of requests: block tables are 512, 3, 1 and 569 wide, alone and among others.
STEPS = (
    ([2048], [8192]),
    ([1] * 8, [8192] * 8),
    ([40], [40]),
    ([9], [9]),
    ([1] * 3, [40] * 3),
    ([1] * 3 + [40], [9100] * 3 + [40]),
    ([1], [9]),
)
NUMS_TOKENS = (2048, 1, 3, 16, 67)


def layer(num_tokens: int) -> None:
    """Run what a layer does beside its attention and products."""
    query_size, kv_size = (heads * SMOLLM2.head_dim for heads in (SMOLLM2.num_query_heads, SMOLLM2.num_kv_heads))
    fused = torch.empty(num_tokens, query_size + 2 * kv_size, dtype=torch.bfloat16)
    parts = fused.split([query_size, kv_size, kv_size], dim=1)
    query, key, value = (part.view(num_tokens, -1, SMOLLM2.head_dim) for part in parts)
    indices = torch.empty(num_tokens, dtype=torch.int64)
    _, key = rotary(query, key, indices, torch.empty(8192, SMOLLM2.head_dim))
    cache = torch.empty(2, 600, 16, SMOLLM2.num_kv_heads, SMOLLM2.head_dim, dtype=torch.bfloat16)
    write_kv(key, value, cache, indices)
    hidden = torch.empty(num_tokens, SMOLLM2.hidden_size, dtype=torch.bfloat16)
    rms_norm(hidden, torch.empty(SMOLLM2.hidden_size, dtype=torch.bfloat16), 1e-5, hidden)
    silu_mul(torch.empty(num_tokens, 2 * SMOLLM2.intermediate_size, dtype=torch.bfloat16))


def sample(num_rows: int, has_options: bool) -> None:
    columns = [torch.empty(num_rows, dtype=torch.int64) for _ in range(4)]
    uniforms = philox_uniform(*columns)
    options = (columns[0], torch.empty(num_rows, dtype=torch.float64), torch.empty(num_rows))
    logits, temperatures = torch.empty(num_rows, SMOLLM2.vocab_size), torch.empty(num_rows)
    sample_tokens(logits, temperatures, *(options if has_options else (None, None, None)), uniforms)


def main() -> None:
    registry.select("triton")
    with compiled_launches(TARGETS["sm_90"]) as launches:
        for query_lens, seq_lens in STEPS:
            attend(SMOLLM2, query_lens, seq_lens)
        for num_tokens in NUMS_TOKENS:
            layer(num_tokens)
            sample(min(num_tokens, 64), has_options=num_tokens % 2 == 0)
    variants = defaultdict(set)
    for launch in launches:
        variants[launch.kernel_name].add(launch.kernel.hash)
    print(json.dumps({name: len(hashes) for name, hashes in variants.items()}))


if __name__ == "__main__":
    main()
