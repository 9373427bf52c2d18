"""Copies on a GPU keep their order with each other and with the steps, whatever its streams do."""

from __future__ import annotations

import random

import fake_kernels
import numpy as np
import pytest
import torch
from fake_device import DEVICE, FakeGpu

from octavo.kernels import registry
from octavo.protocol.worker_messages import BlockCopy, CopyKind
from octavo.worker.block_copies import BlockCopier, Tier

NUM_DEVICE, NUM_HOST = 6, 5


@pytest.fixture(autouse=True)
def _late_kernels():
    fake_kernels.select()
    yield
    registry.select()


class Blocks:
    """Both tiers on a fake GPU, each block filled with one number; and what they should hold."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        shape = (2, 2, NUM_DEVICE, 3, 1, 2)
        self.device_cache = torch.empty(shape, device=DEVICE)
        host_cache = gpu.empty_host((*shape[:2], NUM_HOST, *shape[3:]), torch.float32)
        self.copier = BlockCopier(self.device_cache, host_cache, check_swapped_blocks=False, device=gpu)
        self.expected = {Tier.DEVICE: [float(i) for i in range(NUM_DEVICE)], Tier.HOST: [-1.0] * NUM_HOST}
        self.device_cache.copy_(torch.arange(float(NUM_DEVICE)).view(1, 1, -1, 1, 1, 1).expand(shape))
        host_cache.fill_(-1.0)
        self.num_written = 100.0

    def copy(self, copies: list[BlockCopy]) -> None:
        tiers = {
            CopyKind.SWAP_OUT: (Tier.DEVICE, Tier.HOST),
            CopyKind.SWAP_IN: (Tier.HOST, Tier.DEVICE),
            CopyKind.DEVICE: (Tier.DEVICE, Tier.DEVICE),
        }
        for kind, source, target in copies:
            source_tier, target_tier = tiers[kind]
            self.expected[target_tier][target] = self.expected[source_tier][source]
        with self.gpu.no_waiting():
            self.copier.apply(copies)

    def compute(self, block: int) -> None:
        """A step that writes `block`, after what it read of the others."""
        with self.gpu.no_waiting():
            self.copier.let_writes_follow_copies(np.array([block]))
            self.device_cache[:, :, block].fill_(self.num_written)
        self.expected[Tier.DEVICE][block] = self.num_written
        self.num_written += 1

    def check(self) -> None:
        self.gpu.synchronize()
        for tier, cache in self.copier.caches.items():
            blocks = getattr(cache, "content", cache).transpose(0, 2).flatten(1)
            assert [sorted(set(block)) for block in blocks.tolist()] == [[value] for value in self.expected[tier]]


def any_copies(rng: random.Random) -> list[BlockCopy]:
    ends = {
        CopyKind.SWAP_OUT: (NUM_DEVICE, NUM_HOST),
        CopyKind.SWAP_IN: (NUM_HOST, NUM_DEVICE),
        CopyKind.DEVICE: (NUM_DEVICE, NUM_DEVICE),
    }
    kinds = rng.choice([list(CopyKind), [CopyKind.SWAP_OUT], [CopyKind.DEVICE]])
    copies = []
    for _ in range(rng.choice((0, 1, 2, 5))):
        kind = rng.choice(kinds)
        num_sources, num_targets = ends[kind]
        copies.append((kind, rng.randrange(num_sources), rng.randrange(num_targets)))
    return copies


@pytest.mark.parametrize("seed", range(60))
def test_steps_and_copies_have_the_effect_of_one_after_the_other(seed):
    rng = random.Random(seed)
    with FakeGpu(seed) as gpu:
        blocks = Blocks(gpu)
        for _ in range(25):
            blocks.copy(any_copies(rng))
            for _ in range(rng.randint(0, 2)):
                blocks.compute(rng.randrange(NUM_DEVICE))
            if rng.random() < 0.3:
                gpu.move_a_little()
        blocks.check()


def test_a_step_that_does_not_write_what_is_swapped_out_does_not_wait():
    with FakeGpu() as gpu:
        blocks = Blocks(gpu)
        gpu.synchronize()
        gpu.moves_by_itself = False
        blocks.copy([(CopyKind.SWAP_OUT, 1, 0)])
        blocks.compute(2)
        while gpu.run_one("compute"):
            pass
        assert gpu.queues["side"], "nothing of the swap has run"
        assert not gpu.queues["compute"]
        blocks.compute(1)
        while gpu.run_one("compute"):
            pass
        assert gpu.queues["compute"], "this one has to wait"
        blocks.check()


def test_what_has_been_swapped_out_is_forgotten():
    with FakeGpu() as gpu:
        blocks = Blocks(gpu)
        blocks.copy([(CopyKind.SWAP_OUT, 1, 0), (CopyKind.SWAP_OUT, 2, 1)])
        assert blocks.copier.swapping_out.keys() == {1, 2}
        gpu.synchronize()
        blocks.compute(4)
        assert not blocks.copier.swapping_out
