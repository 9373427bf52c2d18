"""philox_uniform on the CPU gives the reference's bits."""

import cpu_kernels
import torch

from octavo.kernels.cpu.philox import cpu_philox_uniform
from octavo.kernels.ops.philox import philox_uniform


def coordinates(num_rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    words = [torch.randint(0, 2**32, (num_rows,), generator=generator) for _ in range(3)]
    seeds[:3] = torch.tensor([0, -1, 2**63 - 1])
    return [seeds, *words]


def test_numbers_are_the_references(executor) -> None:
    given = coordinates(5000)
    cpu_kernels.assert_same_bits([cpu_philox_uniform(*given)], [philox_uniform.implementations["torch"](*given)])


def test_recorded_numbers_are_replayed_on_fewer_rows(each_isa) -> None:
    cpu_kernels.assert_replays(cpu_philox_uniform, coordinates(200), [1, 200, 64, 65])
