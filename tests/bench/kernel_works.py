"""What `kernels.py` times: each kernel's work at the shapes of a model, with the bytes and operations it cannot avoid.

A work runs several instances of its kernel one after the other, each with weights of its own, as the layers of a model
have: a weight that is used again at once lies in a cache where no step would find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from octavo.kernels.ops import packed_linear as packed
from octavo.kernels.ops.activation import silu_mul
from octavo.kernels.ops.attention import HeadShape, paged_attention, plan_attention
from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.ops.packed_linear import Activation, PackedWeight, WeightFormat
from octavo.kernels.ops.rotary_kv import rotary_and_write_kv
from octavo.kernels.ops.sampling import sample_tokens

ROWS_WITH_ALL_LAYERS = 32
FEW_LAYERS = 6
BLOCK_SIZE = 16
NUM_BLOCKS = 64  # of the cache that is written
GATED = "gate_up + silu"


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model; by default SmolLM2-135M's."""

    hidden_size: int = 576
    intermediate_size: int = 1536
    vocab_size: int = 49152
    num_query_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    num_layers: int = 30

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.num_query_heads, self.num_kv_heads, self.head_dim)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name of each layer's matrices -> (inputs, outputs)."""
        query_size, kv_size = self.num_query_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.hidden_size, query_size + 2 * kv_size),
            "out": (query_size, self.hidden_size),
            GATED: (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
        }


@dataclass(frozen=True)
class Work:
    """One line of the table.

    Attributes:
        run: one step of the work, of `num_instances` kernels, with the chosen ops.
        run_torch: the same with torch.
        num_rows: of each kernel; None: the work cannot be recorded, and is called.
        num_bytes: that each instance must move between memory and the processor.
        num_operations: of each instance, of `operation_type`.
    """

    name: str
    run: Callable[[], object]
    run_torch: Callable[[], object]
    num_rows: int | None
    num_instances: int
    num_bytes: float
    num_operations: float = 0.0
    operation_type: str = "fp32"


def random_rows(weight_format: WeightFormat, num_rows: int, num_inputs: int) -> torch.Tensor:
    """Rows of a weight in its storage format: small random numbers, or blocks of random codes with small scales."""
    if weight_format in packed.ROW_DTYPES:
        return (torch.randn(num_rows, num_inputs) * 0.05).to(packed.ROW_DTYPES[weight_format])
    block_bytes = packed.BLOCK_BYTES[weight_format]
    blocks = torch.randint(0, 256, (num_rows * num_inputs // packed.WEIGHTS_PER_BLOCK, block_bytes), dtype=torch.uint8)
    head = torch.full((len(blocks), 2 if weight_format is WeightFormat.Q4_1 else 1), 0.01, dtype=torch.float16)
    blocks[:, : head.shape[1] * 2] = head.view(torch.uint8)
    return blocks.view(num_rows, -1)


def random_weight(
    weight_format: WeightFormat, num_outputs: int, num_inputs: int, is_gated: bool = False
) -> PackedWeight:
    num_bytes = packed.packed_num_bytes(weight_format, num_outputs, num_inputs, is_gated)
    weight = PackedWeight(torch.zeros(num_bytes, dtype=torch.uint8), weight_format, num_outputs, num_inputs, is_gated)
    packed.pack_rows(weight, 0, random_rows(weight_format, num_outputs, num_inputs))
    return weight


def _layers_for(shapes: Shapes, num_rows: int) -> int:
    return shapes.num_layers if num_rows <= ROWS_WITH_ALL_LAYERS else min(shapes.num_layers, FEW_LAYERS)


def _each(operation: Callable[..., Any], instances: Sequence[Any]) -> Callable[[], list[Any]]:
    return lambda: [operation(instance) for instance in instances]


def _multiply(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if weight.is_gated:
        return packed.packed_gated_linear(x, weight, Activation.SILU)
    return packed.packed_linear(x, weight)


def _multiply_by_torch(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    product = functional.linear(x, weight)
    if not is_gated:
        return product
    gate, up = product.chunk(2, -1)
    return functional.silu(gate) * up


def linear_works(shapes: Shapes, weight_format: WeightFormat, all_rows: Sequence[int]) -> Iterator[Work]:
    """Products with each matrix of a layer, beside torch's with bfloat16 weights."""
    operation_type = "bf16" if weight_format is WeightFormat.BFLOAT16 else "int8"
    for name, (num_inputs, num_outputs) in shapes.linears().items():
        is_gated = name == GATED
        weights = [random_weight(weight_format, num_outputs, num_inputs, is_gated) for _ in range(shapes.num_layers)]
        plain = [torch.randn(num_outputs, num_inputs).bfloat16() for _ in range(shapes.num_layers)]
        for num_rows in all_rows:
            x = torch.randn(num_rows, num_inputs).bfloat16()
            num_layers = _layers_for(shapes, num_rows)
            yield Work(
                f"linear {name} {weight_format}, {num_rows} rows",
                _each(lambda weight, x=x: _multiply(x, weight), weights[:num_layers]),
                _each(lambda weight, x=x, g=is_gated: _multiply_by_torch(x, weight, g), plain[:num_layers]),
                num_rows,
                num_layers,
                packed.row_num_bytes(weight_format, num_inputs) * num_outputs
                + 2 * num_rows * (num_inputs + num_outputs),
                2.0 * num_rows * num_inputs * num_outputs,
                operation_type,
            )


def head_works(shapes: Shapes, weight_format: WeightFormat, all_rows: Sequence[int]) -> Iterator[Work]:
    """Logits of the vocabulary."""
    weight = random_weight(weight_format, shapes.vocab_size, shapes.hidden_size)
    plain = torch.randn(shapes.vocab_size, shapes.hidden_size).bfloat16()
    for num_rows in all_rows:
        hidden = torch.randn(num_rows, shapes.hidden_size).bfloat16()
        yield Work(
            f"logits {weight_format}, {num_rows} rows",
            lambda hidden=hidden: packed.packed_logits(hidden, weight),
            lambda hidden=hidden: functional.linear(hidden, plain).float(),
            None,
            1,
            packed.row_num_bytes(weight_format, shapes.hidden_size) * shapes.vocab_size
            + num_rows * (2 * shapes.hidden_size + 4 * shapes.vocab_size),
            2.0 * num_rows * shapes.hidden_size * shapes.vocab_size,
            "bf16" if weight_format is WeightFormat.BFLOAT16 else "int8",
        )


def _attention_work(shapes: Shapes, name: str, query_lens: list[int], seq_lens: list[int]) -> Work:
    heads, num_tokens = shapes.heads, sum(query_lens)
    max_blocks = -(-max(seq_lens) // BLOCK_SIZE)
    num_blocks = max_blocks * len(seq_lens)
    tables = torch.randperm(num_blocks, dtype=torch.int32).view(len(seq_lens), max_blocks)
    shape = 2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim
    num_layers = _layers_for(shapes, num_tokens)
    caches = [torch.randn(shape).bfloat16() for _ in range(num_layers)]
    query = torch.randn(num_tokens, heads.num_query_heads, heads.head_dim).bfloat16()
    lens, starts = torch.tensor(seq_lens, dtype=torch.int32), torch.tensor([0, *query_lens]).cumsum(0).int()
    plan = plan_attention(torch.tensor(query_lens, dtype=torch.int32).numpy(), lens.numpy(), heads)
    given = starts, lens, tables, heads.head_dim**-0.5
    reference = paged_attention.implementations["torch"]
    kv_bytes = sum(seq_lens) * 2 * heads.num_kv_heads * heads.head_dim * 2
    num_pairs = sum(q * s - q * (q - 1) / 2 for q, s in zip(query_lens, seq_lens, strict=True))
    return Work(
        f"attention, {name}",
        _each(lambda cache: paged_attention(query, cache, *given, plan=plan), caches),
        _each(lambda cache: reference(query, cache, *given), caches[:1]),
        num_tokens,
        num_layers,
        kv_bytes + 2 * query.nbytes,
        4.0 * num_pairs * heads.num_query_heads * heads.head_dim,
        "bf16",
    )


def attention_works(shapes: Shapes) -> Iterator[Work]:
    yield _attention_work(shapes, "1 decode, context 300", [1], [300])
    yield _attention_work(shapes, "8 decode, context 300", [1] * 8, [300] * 8)
    yield _attention_work(shapes, "32 decode, context 300", [1] * 32, [300] * 32)
    yield _attention_work(shapes, "32 decode, contexts 16 to 2,000", [1] * 32, list(range(16, 2048, 64)))
    yield _attention_work(shapes, "prefill of 512", [512], [512])
    yield _attention_work(shapes, "31 decode and a prefill of 481", [1] * 31 + [481], [300] * 31 + [481])


def small_works(shapes: Shapes, all_rows: Sequence[int]) -> Iterator[Work]:
    """Norms, gated products, and rotary embedding with the KV write."""
    heads, num, size = shapes.heads, shapes.num_layers, shapes.hidden_size
    weight = torch.randn(size).bfloat16()
    cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim).bfloat16()
    cos_sin = torch.randn(2048, heads.head_dim)
    for num_rows in all_rows:
        x = torch.randn(num_rows, size).bfloat16()
        gate_up = torch.randn(num_rows, 2 * shapes.intermediate_size).bfloat16()
        qkv = torch.randn(num_rows, (heads.num_query_heads + 2 * heads.num_kv_heads) * heads.head_dim).bfloat16()
        slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_rows]
        for name, op, given, num_bytes in (
            ("rms_norm", rms_norm, (x, weight, 1e-5), 2 * x.nbytes),
            ("rms_norm + residual", rms_norm, (x, weight, 1e-5, x), 4 * x.nbytes),
            ("silu_mul", silu_mul, (gate_up,), 1.5 * gate_up.nbytes),
            ("rotary + KV write", rotary_and_write_kv, (qkv, slots, cos_sin, cache, slots, heads), 2 * qkv.nbytes),
        ):
            run = _each(lambda _, op=op, given=given: op(*given), range(num))
            run_torch = _each(lambda _, op=op, given=given: op.implementations["torch"](*given), range(num))
            yield Work(f"{name}, {num_rows} rows", run, run_torch, num_rows, num, num_bytes)


def sampling_works(shapes: Shapes) -> Iterator[Work]:
    for num_rows in (1, 32):
        logits, ones = torch.randn(num_rows, shapes.vocab_size) * 3, torch.ones(num_rows)
        uniforms, top_p = torch.rand(num_rows, dtype=torch.float64), ones.double() * 0.9
        options = {
            "greedy": (ones * 0, None, None, None),
            "temperature 1": (ones, None, None, None),
            "min_p 0.05": (ones, None, None, ones * 0.05),
            "top_k 50, top_p 0.9": (ones, torch.full((num_rows,), 50), top_p, None),
            "top_p 0.9, peaked": (ones * 0.4, None, top_p, None),
            "top_p 0.9, flat": (ones, None, top_p, None),
        }
        for name, values in options.items():
            given = logits, *values, uniforms
            yield Work(
                f"sample_tokens, {num_rows} rows, {name}",
                lambda given=given: sample_tokens(*given),
                lambda given=given: sample_tokens.implementations["torch"](*given),
                None,
                1,
                logits.nbytes,
            )
        yield Work(
            f"likeliest_tokens, {num_rows} rows, 16",
            lambda logits=logits: likeliest_tokens(logits, 16),
            lambda logits=logits: likeliest_tokens.implementations["torch"](logits, 16),
            None,
            1,
            logits.nbytes,
        )
