"""The engine core and the real worker in one process, without sockets: the shortest way from requests to tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.engine_core.engine_core import EngineCore
from octavo.protocol.codec import decode_scheduler_output, decode_worker_event, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import AddRequest, FinishReason
from octavo.protocol.lifecycle import AnyStatus, Reporter
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput, WorkerReady
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
    """Takes batches of prompts and returns their tokens."""

    def __init__(self, config: EngineConfig) -> None:
        runner = build_runner(config, read_config(config.model.path), SilentReporter())
        self.executor = InlineExecutor(runner)
        self.core = EngineCore(
            config, self.executor, WorkerReady(0, runner.kv_cache.shape[2], config.cache.num_host_blocks or 0)
        )
        self.num_requests = 0

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[tuple[list[int], FinishReason]]:
        """Run all prompts at once; return output token ids and finish reason of each."""
        names = [f"r{self.num_requests + index}" for index in range(len(prompts))]
        self.num_requests += len(prompts)
        for order, (name, prompt, param) in enumerate(zip(names, prompts, params, strict=True)):
            self.core.add(OWNER, AddRequest(name, list(prompt), param, float(order)))
        outputs: dict[str, list[int]] = {name: [] for name in names}
        reasons: dict[str, FinishReason] = {}
        while len(reasons) < len(names):
            self.core.step()
            self.core.update(self.executor.results.popleft())
            for output in self.core.take_outputs().get(OWNER, []):
                assert output.first_index == len(outputs[output.request_id])
                outputs[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
        self._drain()
        return [(outputs[name], reasons[name]) for name in names]

    def _drain(self) -> None:
        while self.executor.results:
            self.core.update(self.executor.results.popleft())
        self.core.check_idle()
