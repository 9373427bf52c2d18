"""The engine core and the real workers in one process, without sockets: the shortest way from requests to tokens.

The ranks of a tensor-parallel group are threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import patch

import msgspec
from rank_threads import run_at_once, thread_groups

from octavo.engine_core.engine_core import EngineCore
from octavo.protocol.codec import decode_scheduler_output, decode_worker_event, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import AddRequest, FinishReason, RequestOutput
from octavo.protocol.lifecycle import AnyStatus, Reporter
from octavo.protocol.logprobs import PromptLogprobs
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput, WorkerReady
from octavo.worker import worker
from octavo.worker.device import Device
from octavo.worker.distributed import SINGLE_RANK
from octavo.worker.distributed_checksum import StepChecksum
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import read_config
from octavo.worker.step_result import PendingStep
from octavo.worker.worker import build_runner

OWNER = b"api-0"


class SilentReporter(Reporter):
    """Keeps what a process would tell the supervisor."""

    def __init__(self) -> None:
        super().__init__(status_fd=-1)
        self.sent: list[AnyStatus] = []

    def send(self, status: AnyStatus) -> None:
        self.sent.append(status)


class InlineExecutor:
    """Launches each step at once, through the bytes of the wire, and reads its result when it is asked for."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        self.runners = runners
        self.checksum = StepChecksum()
        self.pending: deque[list[PendingStep]] = deque()

    @property
    def runner(self) -> ModelRunner:
        """Rank 0's."""
        return self.runners[0]

    def execute(self, step: SchedulerOutput) -> None:
        frame = encode(step)
        self.checksum.update(frame)
        launches = [partial(self._launch, runner, frame) for runner in self.runners]
        self.pending.append(run_at_once([runner.group for runner in self.runners], launches))

    def _launch(self, runner: ModelRunner, frame: bytes) -> PendingStep:
        return runner.launch(decode_scheduler_output(frame), self.checksum.value)

    def receive(self) -> ModelRunnerOutput:
        result, *others = [pending.result() for pending in self.pending.popleft()]
        for other in others:
            assert other.sampled_token_ids == result.sampled_token_ids, "every rank goes on from the same tokens"
        event = decode_worker_event(encode(result))
        assert isinstance(event, ModelRunnerOutput)
        return event


def build_ranks(
    config: EngineConfig, reporter: Reporter, device: Device | None
) -> tuple[list[ModelRunner], WorkerReady]:
    """Return the runner of each rank, and what the engine core gets to know of them."""
    model_config = read_config(config.model.path)
    groups = thread_groups(config.parallel.tensor_parallel_size)
    builds = [partial(build_runner, config, model_config, reporter, group.rank, device) for group in groups]
    with patch.object(worker, "make_group", lambda config, rank, device: groups[rank] if groups[1:] else SINGLE_RANK):
        runners, readies = zip(*run_at_once(groups, builds), strict=True)
    assert len({(ready.num_device_blocks, ready.num_host_blocks) for ready in readies}) == 1
    return list(runners), readies[0]


def joined(known: RequestOutput, more: RequestOutput) -> RequestOutput:
    """Return what a request has got so far and what comes now."""
    assert known.finish_reason is None
    assert more.first_index == len(known.token_ids)
    logprobs, prompt_logprobs = known.logprobs or more.logprobs, known.prompt_logprobs or more.prompt_logprobs
    if known.logprobs is not None and more.logprobs is not None:
        logprobs = known.logprobs.joined(more.logprobs)
    if known.prompt_logprobs is not None and more.prompt_logprobs is not None:
        first_position, rows = known.prompt_logprobs.first_position, known.prompt_logprobs.rows
        assert more.prompt_logprobs.first_position == first_position + rows.num_rows
        prompt_logprobs = PromptLogprobs(first_position, rows.joined(more.prompt_logprobs.rows))
    return msgspec.structs.replace(
        more,
        first_index=0,
        token_ids=known.token_ids + more.token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class InlineEngine:
    """Runs requests to their ends."""

    def __init__(self, config: EngineConfig, device: Device | None = None) -> None:
        self.reporter = SilentReporter()
        runners, memory = build_ranks(config, self.reporter, device)
        self.executor = InlineExecutor(runners)
        self.core = EngineCore(config, self.executor, memory)
        self.num_requests = 0

    def run(self, commands: Sequence[AddRequest], observe: Callable[[], object] = lambda: None) -> list[RequestOutput]:
        """Run all requests at once; return all of each in one output, in the order of `commands`.

        `observe` is called after each step.
        """
        for command in commands:
            self.core.add(OWNER, command)
        outputs = {command.request_id: RequestOutput(command.request_id, 0, []) for command in commands}
        while any(output.finish_reason is None for output in outputs.values()):
            self.core.step()
            observe()
            self.core.update(self.executor.receive())
            for output in self.core.take_outputs().get(OWNER, []):
                outputs[output.request_id] = joined(outputs[output.request_id], output)
        while self.executor.pending:
            self.core.update(self.executor.receive())
        self.core.check_idle()
        return list(outputs.values())

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[tuple[list[int], FinishReason]]:
        """Run all prompts at once; return output token ids and finish reason of each."""
        names = [f"r{self.num_requests + index}" for index in range(len(prompts))]
        self.num_requests += len(prompts)
        commands = [
            AddRequest(name, list(prompt), param, float(order))
            for order, (name, prompt, param) in enumerate(zip(names, prompts, params, strict=True))
        ]
        ends = [(end.token_ids, end.finish_reason) for end in self.run(commands)]
        return [(token_ids, reason) for token_ids, reason in ends if reason is not None]
