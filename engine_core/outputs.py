"""What a request's owner hears of it."""

from __future__ import annotations

import msgspec

from octavo.engine_core.beam_search import BeamGroup
from octavo.engine_core.request import Request
from octavo.protocol.engine_messages import ErrorCode, FinishReason, RequestOutput
from octavo.protocol.logprobs import PromptLogprobs, TokenLogprobs


def token_output(request: Request, token_ids: list[int]) -> RequestOutput:
    """The output that ends with the request's last token, of which `token_ids` are new."""
    finish_reason = request.finish_reason()
    return RequestOutput(
        request.request_id,
        len(request.output_token_ids) - len(token_ids),
        token_ids,
        finish_reason,
        request.output_token_ids[-1] if finish_reason is FinishReason.STOP else None,
        request.num_cached_tokens,
    )


def prompt_output(request: Request, prompt_logprobs: PromptLogprobs) -> RequestOutput:
    """What a request hears of its prompt, between its tokens."""
    first_index = len(request.output_token_ids)
    num_cached_tokens = request.num_cached_tokens
    return RequestOutput(
        request.request_id, first_index, [], num_cached_tokens=num_cached_tokens, prompt_logprobs=prompt_logprobs
    )


def with_logprobs(outputs: list[RequestOutput], logprobs: dict[str, TokenLogprobs]) -> list[RequestOutput]:
    """Put a step's logprobs into the outputs with the tokens that they belong to, for requests that asked."""
    return [
        msgspec.structs.replace(output, logprobs=logprobs[output.request_id])
        if output.token_ids and output.request_id in logprobs
        else output
        for output in outputs
    ]


def error_output(request: Request, error: ErrorCode, message: str) -> RequestOutput:
    """The end of a request that failed; a beam's failure is its search's."""
    group = request.beam_group
    return RequestOutput(
        request.request_id if group is None else group.request_id,
        request.num_output_tokens if group is None else 0,
        [],
        FinishReason.ERROR,
        error=error,
        error_message=message,
    )


def beam_output(group: BeamGroup, num_cached_tokens: int) -> RequestOutput:
    """The end of a search: its best beams."""
    beams = group.finished[: group.params.num_choices]
    return RequestOutput(
        group.request_id, 0, [], beams[0].finish_reason, num_cached_tokens=num_cached_tokens, beams=beams
    )
