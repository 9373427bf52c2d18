"""Does a request fit: now, or ever?

Admitting whoever fits right now would fill the last block, and the next step would preempt. So a request is admitted
only if every running request, the new one included, could still take one more block: none of them takes a second one
within the next `block_size` steps. A request that would run alone needs no such margin; whether it fits at all was
checked when it came in. Rejected: reserving the whole possible output, which leaves most of the memory empty.
"""

from __future__ import annotations

from octavo.engine_core.kv_cache_manager import KVCacheManager
from octavo.engine_core.request import Request


def has_room(num_needed_blocks: int, num_free_blocks: int, num_running_requests: int) -> bool:
    """Whether a request that needs `num_needed_blocks` for its known tokens is admitted now."""
    margin = num_running_requests + 1 if num_running_requests else 0
    return num_needed_blocks + margin <= num_free_blocks


def why_never(request: Request, max_model_len: int, kv_cache_manager: KVCacheManager) -> str | None:
    """Why the request could not run even alone, with the numbers; None when it could."""
    if request.num_prompt_tokens >= max_model_len:
        return (
            f"the prompt has {request.num_prompt_tokens} tokens; the context of {max_model_len} tokens "
            f"leaves room for at most {max_model_len - 1}"
        )
    num_needed_blocks = kv_cache_manager.num_blocks_for(request.max_num_kv_tokens)
    if num_needed_blocks > kv_cache_manager.num_total_blocks:
        return (
            f"prompt and output may have {request.max_num_tokens} tokens ({request.num_prompt_tokens} of prompt); they "
            f"need {num_needed_blocks} blocks of {kv_cache_manager.block_size} tokens, and there are "
            f"{kv_cache_manager.num_total_blocks}"
        )
    return None
