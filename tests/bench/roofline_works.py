"""What `roofline.py` predicts: ops on the shapes of an 8B model, with their launches compiled for one target.

    python tests/bench/roofline_works.py sm_90      prints JSON: [name, [launch, ...]] of each op

Bytes and operations are what the op must do, from the shapes; they are not read off the kernels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "aot"))

import aot_cases
import numpy as np
from aot_cases import LLAMA_8B
from aot_compile import compiled_launches, resources_of
from aot_targets import TARGETS, Target
from roofline import Amount

from octavo.kernels.ops import attention

ITEM_BYTES = 2  # bf16
HEADS = attention.HeadShape(LLAMA_8B.num_query_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim)
NUM_TOKENS = 256  # of the ops on activations, as in aot_cases


@dataclass(frozen=True)
class Item:
    """An op, and by kernel what its launches must do."""

    name: str
    run: Callable[[], None]
    amounts: dict[str, Amount]


def attention_item(name: str, query_lens: list[int], seq_lens: list[int]) -> Item:
    """Keys and values once per tile of queries of one request; each query against the keys that it sees.

    Work item, block table, and keys are loads that wait for each other, so two come before the first large one.
    """
    plan = attention.plan_attention(np.array(query_lens, np.int32), np.array(seq_lens, np.int32), HEADS)
    num_queries = sum(query_lens)
    num_pairs = sum(n * s - n * (n - 1) // 2 for n, s in zip(query_lens, seq_lens, strict=True))
    num_scores = num_pairs * HEADS.num_query_heads
    kv_bytes = sum(seq_lens) * 2 * HEADS.num_kv_heads * HEADS.head_dim * ITEM_BYTES
    query_bytes = num_queries * HEADS.num_query_heads * HEADS.head_dim * ITEM_BYTES
    partial_bytes = plan.num_partials * HEADS.num_query_heads * (HEADS.head_dim + 1) * 4
    main = Amount(
        num_bytes=kv_bytes + 2 * query_bytes,
        flops=4 * HEADS.head_dim * num_scores,
        num_scores=num_scores,
        num_dependent_loads=2,
        extra_bytes=partial_bytes,
    )
    reduction = Amount(num_bytes=0, extra_bytes=partial_bytes)
    amounts = {"paged_attention_kernel": main, "attention_reduction_kernel": reduction}
    return Item(name, lambda: aot_cases.attend(LLAMA_8B, query_lens, seq_lens), amounts)


def activation_bytes(width: int) -> int:
    return NUM_TOKENS * width * ITEM_BYTES


QKV_WIDTH = (HEADS.num_query_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim
KV_WIDTH = 2 * HEADS.num_kv_heads * HEADS.head_dim


def items() -> list[Item]:
    rotated = activation_bytes(QKV_WIDTH - HEADS.num_kv_heads * HEADS.head_dim)
    return [
        attention_item("attention, decode of 64 × 2,048", [1] * 64, [2048] * 64),
        attention_item("attention, decode of 256 × 2,048", [1] * 256, [2048] * 256),
        attention_item("attention, decode of 1 × 32,768", [1], [32768]),
        attention_item("attention, prefill of 4 × 2,048", [2048] * 4, [2048] * 4),
        attention_item("attention, prefill of 8,192", [8192], [8192]),
        Item(
            "KV write, 256 tokens",
            lambda: aot_cases.write_kv(LLAMA_8B),
            {"write_kv_kernel": Amount(num_bytes=2 * activation_bytes(KV_WIDTH), num_dependent_loads=1)},
        ),
        Item(
            "norm and residual, 256 × 4,096",
            lambda: aot_cases.rms_norm(4096, has_residual=True),
            {"rms_norm_kernel": Amount(num_bytes=4 * activation_bytes(4096), num_dependent_loads=0)},
        ),
        Item(
            "rotary, 256 tokens",
            lambda: aot_cases.rotate(LLAMA_8B),
            {"rotary_kernel": Amount(num_bytes=2 * rotated)},
        ),
        Item(
            "SiLU and product, 256 × 14,336",
            lambda: aot_cases.gated("silu_mul", 14336),
            {"gated_product_kernel": Amount(num_bytes=3 * activation_bytes(14336), num_dependent_loads=0)},
        ),
        Item(
            "sampling, 64 × 128,256",
            lambda: aot_cases.sample_plainly(128256),
            {"sample_kernel": Amount(num_bytes=64 * 128256 * 4, num_dependent_loads=1)},
        ),
    ]


def launches_of(item: Item, target: Target) -> list[dict[str, Any]]:
    with compiled_launches(target) as launches:
        item.run()
    result = []
    for launch in launches:
        resources = resources_of(launch.kernel, target)
        blocks = target.resident_blocks(resources.num_warps, resources.num_registers, resources.shared_bytes)
        fixed = {"kernel": launch.kernel_name, "num_programs": launch.num_programs, "resident_blocks": blocks}
        result.append({**fixed, "resources": resources.as_dict(), **vars(item.amounts[launch.kernel_name])})
    return result


if __name__ == "__main__":
    chosen = TARGETS[sys.argv[1]]
    print(json.dumps([(item.name, launches_of(item, chosen)) for item in items()]))
