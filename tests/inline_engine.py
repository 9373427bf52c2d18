"""The engine core and the real worker in one process, without sockets: the shortest way from requests to tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from octavo.engine_core.engine_core import EngineCore
from octavo.protocol.codec import decode_scheduler_output, decode_worker_event, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import AddRequest, FinishReason, RequestOutput
from octavo.protocol.lifecycle import AnyStatus, Reporter
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import read_config
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
    """Runs each step at once, through the bytes of the wire; results wait until they are taken."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.results: deque[ModelRunnerOutput] = deque()

    def execute(self, step: SchedulerOutput) -> None:
        result = self.runner.execute(decode_scheduler_output(encode(step)))
        event = decode_worker_event(encode(result))
        assert isinstance(event, ModelRunnerOutput)
        self.results.append(event)


class InlineEngine:
    """Runs requests to their ends."""

    def __init__(self, config: EngineConfig) -> None:
        runner, memory = build_runner(config, read_config(config.model.path), SilentReporter())
        self.executor = InlineExecutor(runner)
        self.core = EngineCore(config, self.executor, memory)
        self.num_requests = 0

    def run(self, commands: Sequence[AddRequest], observe: Callable[[], object] = lambda: None) -> list[RequestOutput]:
        """Run all requests at once; return the end of each, with all of its tokens, in the order of `commands`.

        `observe` is called after each step.
        """
        for command in commands:
            self.core.add(OWNER, command)
        outputs: dict[str, list[int]] = {command.request_id: [] for command in commands}
        ends: dict[str, RequestOutput] = {}
        while len(ends) < len(commands):
            self.core.step()
            observe()
            self.core.update(self.executor.results.popleft())
            for output in self.core.take_outputs().get(OWNER, []):
                assert output.first_index == len(outputs[output.request_id])
                outputs[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    token_ids = outputs[output.request_id]
                    ends[output.request_id] = msgspec.structs.replace(output, first_index=0, token_ids=token_ids)
        while self.executor.results:
            self.core.update(self.executor.results.popleft())
        self.core.check_idle()
        return [ends[command.request_id] for command in commands]

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
