"""Requests that report the logprobs of their prompt, and so have to compute all of it.

Until the last of these is here such a request takes no cached prefix, neither at its admission nor when it comes back
from a preemption that gave its blocks up: what is not computed reports nothing. It may be swapped, as that keeps what
it computed, and others may share its blocks. Rows that come again, because a prompt was computed again from its start,
are the same, and are dropped here: outputs have each once, in order. Rejected: remembering which tokens of a cached
block were reported, to compute the others only.
"""

from __future__ import annotations

import msgspec

from octavo.engine_core.invariants import require
from octavo.engine_core.outputs import prompt_output
from octavo.engine_core.request import Request, RequestStatus
from octavo.engine_core.step_plan import StepPlan
from octavo.protocol.engine_messages import RequestOutput
from octavo.protocol.logprobs import PromptLogprobs
from octavo.protocol.sampling_params import NO_LOGPROBS
from octavo.protocol.worker_messages import ModelRunnerOutput


def take_prompt_logprobs(plan: StepPlan, result: ModelRunnerOutput) -> list[RequestOutput]:
    """Return what a step found out about the prompts of live requests, as far as it is new."""
    outputs = []
    for request in plan.scheduled:
        found = result.prompt_logprobs.get(request.request_id)
        if found is not None and request.status is not RequestStatus.FINISHED and request.needs_whole_prompt:
            outputs += _take(request, found)
    return outputs


def _take(request: Request, found: PromptLogprobs) -> list[RequestOutput]:
    next_position = request.num_prompt_tokens - request.num_prompt_logprobs_left
    num_known = next_position - found.first_position
    require(num_known >= 0, f"{request.request_id}: no logprobs of prompt token {next_position}")
    rows = found.rows.tail(num_known)
    if not rows.num_rows:
        return []
    request.num_prompt_logprobs_left -= rows.num_rows
    if not request.needs_whole_prompt:  # a row that it gets from now on has nothing to report
        request.sampling_params = msgspec.structs.replace(request.sampling_params, num_prompt_logprobs=NO_LOGPROBS)
    return [prompt_output(request, PromptLogprobs(next_position, rows))]
