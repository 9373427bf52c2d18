"""Batched copies have the effect of one after the other, in few batches; checksums see every flipped bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protocol.worker_messages import BlockCopy, CopyKind
from octavo.worker import block_copies
from octavo.worker.block_copies import BlockCopier, Tier, batch_copies, block_checksum, measure_copied_blocks_per_s

NUM_DEVICE, NUM_HOST = 5, 4
OUT, IN, DEVICE = CopyKind.SWAP_OUT, CopyKind.SWAP_IN, CopyKind.DEVICE
NUM_BLOCKS = {Tier.DEVICE: NUM_DEVICE, Tier.HOST: NUM_HOST}
ENDS = {OUT: (NUM_DEVICE, NUM_HOST), IN: (NUM_HOST, NUM_DEVICE), DEVICE: (NUM_DEVICE, NUM_DEVICE)}


def tier(num_blocks: int, first: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2, 2, num_blocks, 3, 1, 2] of numbers that are all different."""
    shape = (2, 2, num_blocks, 3, 1, 2)
    return (torch.arange(24 * num_blocks) + first).view(shape).to(dtype)


def copier_of(check: bool = False, dtype: torch.dtype = torch.float32) -> BlockCopier:
    return BlockCopier(tier(NUM_DEVICE, 0, dtype), tier(NUM_HOST, 1000, dtype), check)


def copy_one_by_one(copier: BlockCopier, copies: list[BlockCopy]) -> None:
    device, host = copier.caches[Tier.DEVICE], copier.caches[Tier.HOST]
    tiers = {OUT: (device, host), IN: (host, device), DEVICE: (device, device)}
    for kind, source, destination in copies:
        tiers[kind][1][:, :, destination] = tiers[kind][0][:, :, source].clone()


@st.composite
def any_copy(draw) -> BlockCopy:
    kind = draw(st.sampled_from(CopyKind))
    num_sources, num_destinations = ENDS[kind]
    return kind, draw(st.integers(0, num_sources - 1)), draw(st.integers(0, num_destinations - 1))


@pytest.mark.parametrize("max_batch_blocks", [1, 2, 100])
@given(copies=st.lists(any_copy(), max_size=14))
@settings(max_examples=400, deadline=None)
def test_batches_equal_one_by_one(max_batch_blocks, copies):
    batched, expected = copier_of(), copier_of()
    batched.max_batch_blocks = max_batch_blocks
    assert batched.apply(copies) == []
    copy_one_by_one(expected, copies)
    for each in Tier:
        assert torch.equal(batched.caches[each], expected.caches[each])


@given(copies=st.lists(any_copy(), max_size=14))
@settings(max_examples=400, deadline=None)
def test_a_batch_keeps_to_what_the_op_takes(copies):
    batches = batch_copies(copies)
    assert sorted((kind, *pair) for kind, pairs in batches for pair in pairs) == sorted(copies)
    assert len(batches) <= len(copies)
    for kind, pairs in batches:
        destinations = [destination for _, destination in pairs]
        assert len(set(destinations)) == len(destinations)
        if kind is DEVICE:
            assert all(source not in destinations[:index] for index, (source, _) in enumerate(pairs))


@pytest.mark.parametrize(
    ("copies", "kinds"),
    [
        ([], []),
        ([(OUT, 0, 0), (OUT, 1, 1), (IN, 2, 0), (IN, 3, 1), (DEVICE, 2, 3)], [OUT, IN, DEVICE]),
        ([(OUT, 0, 0), (IN, 2, 0), (OUT, 1, 1), (IN, 3, 1)], [OUT, IN]),  # two requests take turns
        ([(DEVICE, 0, 1), (DEVICE, 2, 0)], [DEVICE]),  # the second writes what the first has read
        ([(DEVICE, 0, 1), (DEVICE, 1, 2)], [DEVICE, DEVICE]),
        ([(DEVICE, 0, 1), (DEVICE, 2, 1)], [DEVICE, DEVICE]),
        ([(OUT, 0, 0), (IN, 0, 3), (OUT, 4, 0)], [OUT, IN, OUT]),  # a host block is used twice in a step
    ],
)
def test_few_batches(copies, kinds):
    assert [kind for kind, _ in batch_copies(copies)] == kinds


def test_many_blocks_are_copied_in_batches_of_bounded_size(monkeypatch):
    batch_sizes = []
    copy_blocks = block_copies.copy_blocks

    def recording(source, destination, pairs):
        batch_sizes.append(len(pairs))
        copy_blocks(source, destination, pairs)

    monkeypatch.setattr(block_copies, "copy_blocks", recording)
    monkeypatch.setattr(block_copies, "BATCH_NUM_BYTES", 2 * 24 * 4 + 5)
    copier = copier_of()
    copier.apply([(OUT, i, i) for i in range(NUM_HOST)] + [(DEVICE, 0, 1)])
    assert batch_sizes == [2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bit", [0, 5, 7])
def test_a_flipped_bit_is_found(dtype, bit):
    copier = copier_of(check=True, dtype=dtype)
    copier.apply([(OUT, 1, 3), (OUT, 2, 0)])
    host = copier.caches[Tier.HOST].view(torch.uint8)
    host[1, 0, 3, 2, 0, 1] ^= 1 << bit
    assert copier.apply([(IN, 0, 2), (IN, 3, 4)]) == [4]
    host[1, 0, 3, 2, 0, 1] ^= 1 << bit
    assert copier.apply([(IN, 3, 4)]) == []


def test_the_latest_content_of_a_host_block_counts():
    copier = copier_of(check=True)
    assert copier.apply([(OUT, 1, 0), (IN, 0, 2), (DEVICE, 3, 1), (OUT, 1, 0), (IN, 0, 4)]) == []
    assert torch.equal(copier.caches[Tier.DEVICE][:, :, 4], tier(NUM_DEVICE, 0)[:, :, 3])


def test_a_block_that_was_never_swapped_out_is_corrupt():
    assert copier_of(check=True).apply([(IN, 2, 1)]) == [1]
    assert copier_of(check=False).apply([(IN, 2, 1)]) == []


def test_a_checksum_covers_every_byte_of_its_block_and_no_other():
    cache = tier(2, 0)
    num_block_bytes = cache.nbytes // 2
    sums = {block_checksum(cache, 1)}
    for index in range(cache.nbytes):
        flipped = cache.clone()
        flipped.view(torch.uint8).view(-1)[index] ^= 1
        sums.add(block_checksum(flipped, 1))
    assert len(sums) == 1 + num_block_bytes


@pytest.mark.parametrize("copy", [(OUT, NUM_DEVICE, 0), (OUT, 0, NUM_HOST), (IN, -1, 0), (DEVICE, 0, NUM_DEVICE)])
def test_a_block_that_is_not_there_is_an_error_before_anything_is_copied(copy):
    copier, untouched = copier_of(), copier_of()
    with pytest.raises(ValueError, match="there are 5 device blocks and 4 host blocks"):
        copier.apply([(OUT, 0, 1), copy])
    assert torch.equal(copier.caches[Tier.HOST], untouched.caches[Tier.HOST])


def test_the_speed_of_copies():
    assert measure_copied_blocks_per_s(copier_of()) > 0
    assert measure_copied_blocks_per_s(BlockCopier(tier(NUM_DEVICE, 0), tier(0, 0), check_swapped_blocks=True)) == 0
