"""Matrix products of the layers.

A row of the result should depend on that row of x alone: the same bits alone as among 512. Matrix libraries do not
promise that: they choose kernel, blocking and threads by shape, and with them the order of summation. Measured with
torch 2.13 on Intel CPUs with AVX-512, with and without AMX, 1 to 4 threads, inner sizes 64 to 5632:
`functional.linear` gives a row other bits at 1 to 3 rows, and mostly at up to 15, than at 512 in fp32 (MKL); below and
above 33 rows in bf16 (oneDNN). Two measures removed the differences: the operands the other way round, W xᵀ, where
both libraries keep one order as long as they do not split the sums; and tiles small enough for that. A single row goes
as two, because MKL has another kernel for one. What is left: bf16 with 192 outputs and 1536 inputs at some numbers of
rows; and MKL's AVX2 kernels, whose rows at the edge of a product differ. A backend with kernels of our own owes more.

The price, in the time of all linear layers of SmolLM2-135M on one core: in fp32 three times as much at 1 to 4 rows,
about nothing from 8 to 128, a sixth at 512; in bf16 a fifth up to 128 rows and twice as much at 512; the head costs
less than before but for 1 to 4 rows in fp32. Rejected: padding to one number of rows, which costs the same at few rows
and twice as much at many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.kernels.registry import op


class Tile(NamedTuple):
    """The largest product that is handed to the library: rows of x, and terms of a sum."""

    num_rows: int
    num_terms: int


TILES = {torch.float32: Tile(1024, 768)}
DEFAULT_TILE = Tile(128, 2048)


def _transposed_product(x: torch.Tensor, weight: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Return W xᵀ, [out, rows]; partial sums of `num_terms` are added in fp32."""
    first, *others = zip(weight.split(num_terms, dim=1), x.split(num_terms, dim=1), strict=True)
    product = first[0] @ first[1].t()
    if not others:
        return product
    total = product.float()
    for weight_part, x_part in others:
        total += weight_part @ x_part.t()
    return total.to(x.dtype)


@op
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x Wᵀ + b.

    Args:
        x: [num_tokens, in].
        weight: [out, in], of the dtype of x.
        bias: [out], or None.

    Returns:
        [num_tokens, out], contiguous, in the dtype of x.
    """
    result = x.new_empty(x.shape[0], weight.shape[0])
    tile = TILES.get(x.dtype, DEFAULT_TILE)
    for rows, result_rows in zip(x.split(tile.num_rows), result.split(tile.num_rows), strict=True):
        num_rows = rows.shape[0]
        product = _transposed_product(rows.expand(2, -1) if num_rows == 1 else rows, weight, tile.num_terms)
        result_rows.copy_(product[:, :num_rows].t())
    return result if bias is None else result.add_(bias)


@op
def head_logits(hidden: torch.Tensor, weight: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """Return hidden Wᵀ in fp32 whatever the dtype of the model: the logits of a vocabulary, or of a part of it.

    Args:
        hidden: [N, hidden_size], in the dtype of the model.
        weight: [vocab_size, hidden_size], of the same dtype.
        tile: fp32 [num_tile_rows, hidden_size], scratch: as many rows of the weight are widened to fp32 at a time. A
            backend that reads the weight in its own dtype leaves it alone.

    Returns:
        fp32 [N, vocab_size].
    """
    wide_hidden = hidden.float()
    logits = wide_hidden.new_empty(hidden.shape[0], weight.shape[0])
    num_tile_rows = tile.shape[0]
    for rows, columns in zip(weight.split(num_tile_rows), logits.split(num_tile_rows, dim=1), strict=True):
        wide_rows = rows if rows.dtype is torch.float32 else tile[: rows.shape[0]].copy_(rows)
        columns.copy_(linear(wide_hidden, wide_rows))
    return logits
