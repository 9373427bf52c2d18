"""Token ids for the shapes of a trace, made when the request arrives, so that a long trace needs little memory.

Invariant: two prompts agree up to the end of a named block exactly if all their named blocks up to there are the same
(and scaled alike); tokens outside named blocks, and all sampled tokens, are the request's own and equal nobody else's.
"""

from __future__ import annotations

from octavo.api_server.client.shapes import Shape

STOP_TOKEN_ID = 0
FIRST_BLOCK_TOKEN_ID = 1
FIRST_PRIVATE_TOKEN_ID = 2**30
VOCAB_SIZE = 2**31 - 1


def private_token_id(index: int) -> int:
    """The token that only the request with this index has."""
    return FIRST_PRIVATE_TOKEN_ID + index


def prompt_token_ids(shape: Shape, index: int) -> list[int]:
    """Token ids of the prompt of the request with this index."""
    token_ids: list[int] = []
    for block_id in shape.block_ids:
        token_ids += [FIRST_BLOCK_TOKEN_ID + block_id] * shape.num_block_tokens
    del token_ids[shape.num_prompt_tokens :]
    token_ids += [private_token_id(index)] * (shape.num_prompt_tokens - len(token_ids))
    return token_ids
