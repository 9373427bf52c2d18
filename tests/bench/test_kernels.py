"""The table of kernels: every work runs, recorded and by torch, at the shapes of a small model."""

from __future__ import annotations

import kernel_table
import kernel_works as works
import pytest
import torch
from kernel_works import Shapes, Work
from machine_peaks import Peaks, measure_peaks
from native_build import COMPILER

import octavo.kernels.cpu.backends  # noqa: F401 - registers the kernels
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.library import find_library
from octavo.kernels.registry import select

SMALL = Shapes(
    hidden_size=64, intermediate_size=96, vocab_size=300, num_query_heads=4, num_kv_heads=2, head_dim=16, num_layers=2
)
PEAKS = Peaks(bytes_per_s=1e9, fp32_per_s=1e9, bf16_per_s=4e9, int8_per_s=8e9)

pytestmark = pytest.mark.skipif(find_library() is None or COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def bench():
    EXECUTOR.start(1)
    select("cpu")
    yield kernel_table.Bench(PEAKS, num_repeats=1, repeat_s=0)
    select()


@pytest.mark.parametrize("part", [part for part in kernel_table.PARTS if part != "attention"])
def test_every_line_of_a_part_is_printed(bench, part: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(kernel_table, "ALL_ROWS", (1, 5))
    bench.report(kernel_table.make_works(SMALL, part, list(kernel_table.FORMATS)))
    lines = capsys.readouterr().out.splitlines()
    num_formats = len(kernel_table.FORMATS)
    expected = {"linear": 4 * 2 * num_formats, "logits": 3 * num_formats, "small": 4 * 2, "sampling": 2 * 7}
    assert len(lines) == expected[part]
    assert all(line.endswith("×") for line in lines)


def test_a_layers_product_is_torchs(bench) -> None:
    for work in works.linear_works(SMALL, works.WeightFormat.BFLOAT16, [5]):
        assert [each.shape for each in work.run()] == [each.shape for each in work.run_torch()]
        assert len(work.run()) == work.num_instances == 2


def test_the_bound_is_the_longer_of_memory_and_arithmetic(bench) -> None:
    def work(num_bytes: float, num_operations: float, operation_type: str) -> Work:
        return Work("", lambda: None, lambda: None, None, 1, num_bytes, num_operations, operation_type)

    assert bench.bound_s(work(3e9, 4e9, "bf16")) == 3.0
    assert bench.bound_s(work(1e9, 16e9, "bf16")) == 4.0
    assert bench.bound_s(work(1e9, 16e9, "int8")) == 2.0


def test_attention_counts_the_pairs_that_are_seen(bench) -> None:
    """Two requests: 3 queries that see 5, 6 and 7 keys, and one that sees 9."""
    work = works._attention_work(SMALL, "", [3, 1], [7, 9])
    assert work.num_operations == 4 * SMALL.num_query_heads * SMALL.head_dim * (5 + 6 + 7 + 9)
    assert len(work.run()) == SMALL.num_layers
    torch.testing.assert_close(work.run()[0].shape, work.run_torch()[0].shape)


def test_peaks_are_measured() -> None:
    instruction_set = EXECUTOR.start(1)
    peaks = measure_peaks(instruction_set, 2, 1_000_000)
    assert min(peaks) > 1e6
