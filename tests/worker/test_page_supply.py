"""Memory for KV blocks that nobody has used yet: which pages get ready, and when."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CachedRequest, NewRequest, SchedulerOutput
from octavo.worker import page_supply
from octavo.worker.page_supply import PageSupply

NUM_LAYERS, NUM_BLOCKS = 3, 4096
SEGMENT_BYTES = NUM_BLOCKS * 16 * 2 * 16 * 2


def make_cache() -> torch.Tensor:
    """Pages that were never written; each of the 6 segments takes 4 MiB, a block 1 KiB of each."""
    memory = mmap.mmap(-1, NUM_LAYERS * 2 * SEGMENT_BYTES)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(NUM_LAYERS, 2, NUM_BLOCKS, 16, 2, 16)


def resident_bytes(cache: torch.Tensor) -> int:
    text = Path("/proc/self/smaps").read_text()
    start = f"{cache.data_ptr():x}-"
    match = re.search(rf"^{start}.*?^Rss:\s+(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return int(match[1]) * 1024


def step(new_blocks: list[int], grown_blocks: list[int]) -> SchedulerOutput:
    new = [NewRequest("a", [1], [], SamplingParams(1), new_blocks, 0)] if new_blocks else []
    grown = [CachedRequest("b", grown_blocks, [])] if grown_blocks else []
    return SchedulerOutput(0, [], [], new, grown, [], [], {})


def fill(supply: PageSupply) -> int:
    count = 0
    while supply.lacks_some:
        supply.add_some()
        count += 1
    return count


def test_a_share_is_ready_behind_the_highest_block() -> None:
    cache = make_cache()
    supply = PageSupply(cache, share_ahead=1 / 4)
    assert resident_bytes(cache) == 0
    assert fill(supply) == NUM_LAYERS * 2
    piece_bytes = NUM_LAYERS * 2 * page_supply.PIECE_BYTES
    assert resident_bytes(cache) == piece_bytes, "a piece of 2,048 blocks, which covers the wanted 1,024"

    supply.note(step([3, 1000], []))
    assert not supply.lacks_some
    supply.note(step([], [1024]))
    assert fill(supply) == NUM_LAYERS * 2
    assert resident_bytes(cache) == 2 * piece_bytes == cache.nbytes
    supply.note(step([NUM_BLOCKS - 1], []))
    assert not supply.lacks_some, "there are no more"


def test_what_blocks_hold_stays() -> None:
    cache = make_cache()
    written = torch.arange(cache.numel() // 8, dtype=torch.int16).view(torch.bfloat16)
    cache.flatten()[: len(written)] = written
    fill(PageSupply(cache, share_ahead=1))
    assert torch.equal(cache.flatten()[: len(written)].view(torch.int16), written.view(torch.int16))
    assert not cache.flatten()[len(written) :].any()


def test_a_system_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(page_supply, "take_pages", lambda *given: asked.append(given))
    supply = PageSupply(make_cache(), share_ahead=1 / 4)
    assert fill(supply) == 1
    supply.note(step([1000], []))
    assert (fill(supply), len(asked)) == (0, 1)
