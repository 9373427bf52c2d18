"""Kernels at once and from a recorded list: the same bits, any number of rows, and nothing left out of a list."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import octavo.kernels.cpu.backends  # noqa: F401 - registers the kernels
from octavo.kernels.cpu.execution import CannotRecordError, Executor
from octavo.kernels.cpu.library import Library, find_library
from octavo.kernels.cpu.norm import cpu_rms_norm

MAX_ROWS = 33
HIDDEN = 48
WEIGHT = torch.linspace(0.5, 1.5, HIDDEN)


@pytest.fixture
def executor(monkeypatch) -> Executor:
    made = Executor()
    made.start(2)
    monkeypatch.setattr("octavo.kernels.cpu.norm.EXECUTOR", made)
    return made


def chain(x: torch.Tensor, num_norms: int = 20) -> torch.Tensor:
    """Ops whose intermediate results die on the way, as those of a model do."""
    total = x
    for _ in range(num_norms):
        x, total = cpu_rms_norm(x, WEIGHT, 1e-5, total)
    return total


def test_a_list_computes_what_its_kernels_compute(executor):
    x = torch.randn(MAX_ROWS, HIDDEN)
    expected = chain(x)
    place = x.clone()
    with executor.record(MAX_ROWS) as commands:
        result = chain(place)
    commands.replay(MAX_ROWS)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 32, 33])
def test_a_list_computes_the_first_rows(executor, num_rows):
    place = torch.randn(MAX_ROWS, HIDDEN)
    with executor.record(MAX_ROWS) as commands:
        result = chain(place)
    commands.replay(MAX_ROWS)
    untouched = result[num_rows:].clone()
    place.normal_()
    commands.replay(num_rows)
    assert torch.equal(result[:num_rows], chain(place[:num_rows].clone()))
    assert torch.equal(result[num_rows:], untouched)


def test_a_list_keeps_what_it_needs_and_uses_it_again(executor):
    place = torch.randn(MAX_ROWS, HIDDEN)
    with executor.record(MAX_ROWS) as few:
        first = chain(place, 3)
    with executor.record(MAX_ROWS) as many:
        second = chain(place, 50)
    assert few.num_bytes == many.num_bytes > 0
    gc.collect()
    torch.full((100, MAX_ROWS, HIDDEN), torch.nan)  # takes whatever memory was given back
    many.replay(MAX_ROWS)
    few.replay(MAX_ROWS)
    assert first.isfinite().all()
    assert torch.equal(second, chain(place, 50))


def test_views_are_no_operations(executor):
    place, ones = torch.randn(MAX_ROWS, 2 * HIDDEN), torch.ones(2 * HIDDEN)
    with executor.record(MAX_ROWS) as commands:
        wide = cpu_rms_norm(place, ones, 1e-5)
        result = wide.view(MAX_ROWS, 2, HIDDEN).transpose(0, 1)[0]
    commands.replay(MAX_ROWS)
    assert torch.equal(result, cpu_rms_norm(place, ones, 1e-5)[:, :HIDDEN])


@pytest.mark.parametrize("compute", [lambda x: x + 1, lambda x: x.clone(), lambda x: x.add_(1), lambda x: x.sum()])
def test_what_is_no_kernel_of_ours_cannot_be_recorded(executor, compute):
    x = torch.randn(MAX_ROWS, HIDDEN)
    with pytest.raises(CannotRecordError, match="is no kernel of ours"), executor.record(MAX_ROWS):
        compute(cpu_rms_norm(x, WEIGHT, 1e-5))
    assert cpu_rms_norm(torch.ones(3, HIDDEN), WEIGHT, 1e-5).isfinite().all()  # and the executor goes on


def test_other_rows_than_those_of_the_list_cannot_be_recorded(executor):
    x = torch.randn(5, HIDDEN)
    with pytest.raises(CannotRecordError, match="5 rows in a list of 33"), executor.record(MAX_ROWS):
        cpu_rms_norm(x, WEIGHT, 1e-5)


def test_nothing_runs_before_the_start():
    with pytest.raises(RuntimeError, match="not started"):
        Executor().library  # noqa: B018 - the access raises
    with pytest.raises(RuntimeError, match="not started"), Executor().record(1):
        pass


def test_without_the_compiled_library(monkeypatch):
    monkeypatch.setattr("octavo.kernels.cpu.execution.find_library", lambda: None)
    with pytest.raises(FileNotFoundError, match="without its CPU kernels"):
        Executor().start(1)


def test_an_instruction_set_that_is_not_there():
    library = Library(find_library(), "portable")
    assert library.supported[-1] == "portable"
    with pytest.raises(ValueError, match=r"no avx9000, only .*portable"):
        Library(find_library(), "avx9000")
    with pytest.raises(KeyError, match="no kernel nonsense for portable"):
        library.kernel("nonsense")


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_teams_of_any_size_agree(monkeypatch, num_threads):
    x = torch.randn(200, HIDDEN)
    results = []
    for size in (1, num_threads):
        executor = Executor()
        executor.start(size)
        monkeypatch.setattr("octavo.kernels.cpu.norm.EXECUTOR", executor)
        results.append(chain(x, 200))
    assert torch.equal(*results)


def test_threads_of_a_process_take_turns(executor):
    """Ranks that are threads, as in tests, share the team."""
    inputs = [torch.randn(MAX_ROWS, HIDDEN) for _ in range(4)]
    expected = [chain(x) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as pool:
        for _ in range(20):
            results = list(pool.map(chain, inputs))
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert executor.start(2) == executor.library.instruction_set  # as it runs already, nothing is started anew
