"""What the tests of CPU kernels share: instruction sets, and results that must be equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.library import Library, find_library

BATCH_SIZES = (2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 70, 512)
"""Numbers of rows around what kernels take at once."""

Rows = Sequence[torch.Tensor]
RowOp = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def supported_instruction_sets() -> list[str]:
    path = find_library()
    return [] if path is None else Library(path).supported


def results_of(op: RowOp, rows: Rows) -> tuple[torch.Tensor, ...]:
    result = op(*rows)
    return result if isinstance(result, tuple) else (result,)


def assert_same_bits(got: Rows, expected: Rows) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def assert_rows_are_independent(op: RowOp, rows: Rows, batch_sizes: Sequence[int] = BATCH_SIZES) -> None:
    """Compare the bits of rows alone, in batches of several sizes and places, with 1 and with 2 threads.

    Args:
        op: takes tensors with as many rows each, gives one or more of the same.
        rows: its arguments, with as many rows as the largest batch.
    """
    num_rows = len(rows[0])
    instruction_set = EXECUTOR.library.instruction_set
    together = results_of(op, rows)
    for num_threads in (1, 2):
        EXECUTOR.start(num_threads, instruction_set)
        assert_same_bits(results_of(op, rows), together)
        for row in range(0, num_rows, max(1, num_rows // 70)):
            alone = results_of(op, [each[row : row + 1] for each in rows])
            assert_same_bits(alone, [each[row : row + 1] for each in together])
        for batch_size in batch_sizes:
            if batch_size > num_rows:
                continue
            for first in {0, 1, num_rows - batch_size} & set(range(num_rows - batch_size + 1)):
                part = slice(first, first + batch_size)
                assert_same_bits(results_of(op, [each[part] for each in rows]), [each[part] for each in together])


def assert_replays(op: RowOp, rows: Rows, nums_rows: Sequence[int]) -> None:
    """Record `op` for all rows, replay it on fewer, on other numbers, and compare bits with the op at once."""
    inputs = [torch.empty_like(each) for each in rows]
    with EXECUTOR.record(len(inputs[0])) as commands:
        outputs = results_of(op, inputs)
    for num_rows in nums_rows:
        for each, given in zip(inputs, rows, strict=True):
            each[:num_rows] = given[len(given) - num_rows :]
        commands.replay(num_rows)
        expected = results_of(op, [given[len(given) - num_rows :] for given in rows])
        assert_same_bits([output[:num_rows] for output in outputs], expected)
