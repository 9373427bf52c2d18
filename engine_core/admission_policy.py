"""Does a request fit: now, or ever?

Admitting whoever fits right now would fill the last block, and the next step would preempt. So a policy says how much
must stay free; each is a small function of the same facts:

- reserve-all: all blocks that everybody may ever need. Never preempts; leaves most of the memory empty.
- watermark: one block for everybody, as nobody takes a second one within the next block_size steps.
- predicted-peak: the most that will be needed at any time, if everybody ends as long as finished requests of that
  length ended on average (the idea of "past-future" scheduling: Gong et al., ASPLOS 2025).

A request that was preempted too often is *pinned*, whatever the policy: it is admitted when all that it and everybody
older may ever need is free, and while it runs nobody older is admitted who would break that. So nobody older can run
out of blocks, and nobody preempts it again.
A request that would run alone needs no margin; whether it fits at all was checked when it came in.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from octavo.engine_core.kv_cache_manager import KVCacheManager
from octavo.engine_core.request import Request
from octavo.protocol.config import AdmissionPolicy

MAX_REMEMBERED_LENGTHS = 1024


class OutputLengths:
    """Output lengths of the requests that finished last, and what they let us expect."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the longest 0, 1, 2, … lengths; empty when they have to be added up anew

    def add(self, num_output_tokens: int) -> None:
        if len(self._latest) == MAX_REMEMBERED_LENGTHS:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._latest.append(num_output_tokens)
        insort(self._sorted, num_output_tokens)
        self._sums = []

    def expected_remaining(self, request: Request) -> int:
        """Mean of what the longer outputs had left at this length; all that may come when there is none."""
        num_output_tokens = request.num_output_tokens
        num_longer = len(self._sorted) - bisect_right(self._sorted, num_output_tokens)
        most = request.max_num_output_tokens - num_output_tokens
        if not num_longer:
            return most
        if not self._sums:
            self._sums = list(accumulate(reversed(self._sorted), initial=0))
        return min(most, -(-self._sums[num_longer] // num_longer) - num_output_tokens)


class Situation(NamedTuple):
    """What a policy may look at.

    Attributes:
        request: who would be admitted.
        num_blocks_to_take: what its known tokens take of the free blocks.
        running: all who hold blocks, oldest first.
        pinned: those of them that were preempted too often to be preempted again.
        lengths: of finished requests.
    """

    request: Request
    num_blocks_to_take: int
    running: Sequence[Request]
    pinned: Collection[Request]
    manager: KVCacheManager
    lengths: OutputLengths

    def num_blocks_ever(self, requests: Sequence[Request]) -> int:
        """Blocks that these running requests may still take."""
        tables = self.manager.block_tables
        return sum(self._num_blocks_in_all(request) - len(tables[request.request_id]) for request in requests)

    def num_own_blocks_ever(self) -> int:
        """Free blocks that the request may take in all."""
        num_more_blocks = self._num_blocks_in_all(self.request) - self.manager.num_blocks_for(self.request.num_tokens)
        return self.num_blocks_to_take + max(0, num_more_blocks)

    def _num_blocks_in_all(self, request: Request) -> int:
        """Blocks of the request at its greatest length, and of the beams that it will still be forked into."""
        manager, group = self.manager, request.beam_group
        num_blocks = manager.num_blocks_for(request.max_num_kv_tokens)
        num_forks = 0 if group is None or group.num_forks else group.params.num_beams - 1
        return num_blocks + num_forks * (num_blocks - request.num_prompt_tokens // manager.block_size)


def needs_reserve_all(situation: Situation) -> int:
    return situation.num_own_blocks_ever() + situation.num_blocks_ever(situation.running)


def needs_watermark(situation: Situation) -> int:
    return situation.num_blocks_to_take + len(situation.running) + 1


def needs_predicted_peak(situation: Situation) -> int:
    """Let everybody end at the expected length, the soonest first: how many blocks are in use just before each end?

    Before the k-th end, the ended ones hold nothing, and all others have grown by the tokens that the k-th had left.
    """
    manager, lengths = situation.manager, situation.lengths
    everybody = [(lengths.expected_remaining(request), request) for request in (*situation.running, situation.request)]
    everybody.sort(key=lambda entry: -entry[0])
    num_tokens, most = 0, 0
    for index, (num_remaining_tokens, request) in enumerate(everybody):
        num_tokens += request.num_prompt_tokens + request.num_output_tokens
        most = max(most, num_tokens + (index + 1) * num_remaining_tokens)
    num_own_blocks = manager.num_blocks_for(situation.request.num_tokens)
    num_shared_blocks = num_own_blocks - situation.num_blocks_to_take
    return manager.num_blocks_for(most) - num_shared_blocks - manager.num_used_blocks


POLICIES: dict[AdmissionPolicy, Callable[[Situation], int]] = {
    AdmissionPolicy.RESERVE_ALL: needs_reserve_all,
    AdmissionPolicy.WATERMARK: needs_watermark,
    AdmissionPolicy.PREDICTED_PEAK: needs_predicted_peak,
}


def has_room(situation: Situation, policy: AdmissionPolicy, max_preemptions: int, *, is_alone: bool) -> bool:
    """Whether the request is admitted now. `is_alone`: nothing else would be computed."""
    num_needed_blocks = situation.num_blocks_to_take
    if not is_alone:
        num_needed_blocks = max(num_needed_blocks, POLICIES[policy](situation))
        is_pinned = situation.request.num_preemptions >= max_preemptions
        pinned = [request.order for request in situation.pinned] + [situation.request.order] * is_pinned
        if pinned and max(pinned) >= situation.request.order:
            older = [request for request in situation.running if request.order <= max(pinned)]
            num_needed_blocks = max(
                num_needed_blocks, situation.num_own_blocks_ever() + situation.num_blocks_ever(older)
            )
    return num_needed_blocks <= situation.manager.num_free_blocks


def why_never(request: Request, max_num_seqs: int, max_model_len: int, manager: KVCacheManager) -> str | None:
    """Why the request could not run even alone, with the numbers; None when it could."""
    num_beams = 1 if request.beam_group is None else request.beam_group.params.num_beams
    if request.num_prompt_tokens > max_model_len:
        return f"the prompt has {request.num_prompt_tokens} tokens; the context has room for {max_model_len}"
    if num_beams > max_num_seqs:
        return f"the search has {num_beams} beams; at most {max_num_seqs} may run at a time"
    num_needed_blocks = num_beams * manager.num_blocks_for(request.max_num_kv_tokens)
    if manager.enable_prefix_caching:  # then beams share the prompt even after a preemption
        num_needed_blocks -= (num_beams - 1) * ((request.num_prompt_tokens - 1) // manager.block_size)
    if num_needed_blocks > manager.num_total_blocks:
        beams = f" for each of {num_beams} beams" if num_beams > 1 else ""
        return (
            f"prompt and output may have {request.max_num_tokens} tokens ({request.num_prompt_tokens} of prompt)"
            f"{beams}; they need {num_needed_blocks} blocks of {manager.block_size} tokens, and there are "
            f"{manager.num_total_blocks}"
        )
    return None
