"""The real scheduler with the oracle as its worker, on no clock, with every invariant checked after every event.

A test drives it by `add`, `abort`, `schedule`, `deliver`, `restart`; in between, results may lag behind as far as
`max_steps_in_flight` allows. Everything goes through the codec, so that messages are the values that a worker gets.
The log of events can be replayed, which must give the same frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from oracle import OracleModel, expected_output

from octavo.engine_core.admission_policy import has_room
from octavo.engine_core.kv_cache_manager import KVCacheManager
from octavo.engine_core.request import Request
from octavo.engine_core.scheduler import Scheduler
from octavo.protocol.codec import decode_scheduler_output, decode_worker_event, encode
from octavo.protocol.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WeightsFormat
from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason, RequestOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput

MAX_STEPS_OF_A_RUN = 200_000


def make_config(
    ipc_directory: str = "-",
    *,
    block_size: int = 4,
    num_device_blocks: int = 64,
    max_model_len: int = 256,
    vocab_size: int = 10_007,
    eos_token_ids: tuple[int, ...] = (2,),
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_tokens_per_request: int | None = None,
    max_steps_in_flight: int = 2,
) -> EngineConfig:
    """A config of the oracle's size."""
    return EngineConfig(
        model=ModelConfig(
            path="-",
            weights_path="-",
            weights_format=WeightsFormat.SAFETENSORS,
            served_model_names=("oracle",),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
        ),
        ipc_directory=ipc_directory,
        cache=CacheConfig(block_size=block_size, num_device_blocks=num_device_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_tokens_per_request=max_tokens_per_request,
            max_steps_in_flight=max_steps_in_flight,
        ),
        worker_module="oracle_worker",
    )


def make_oracle(config: EngineConfig) -> OracleModel:
    model = config.model
    return OracleModel(
        config.cache.num_device_blocks or 0,
        config.cache.block_size,
        model.vocab_size,
        model.eos_token_ids,
        config.scheduler.max_num_seqs,
    )


def make_scheduler(config: EngineConfig) -> Scheduler:
    manager = KVCacheManager(config.cache.num_device_blocks or 0, config.cache.block_size)
    return Scheduler(config.model, config.scheduler, manager)


def expected(config: EngineConfig, command: AddRequest) -> tuple[list[int], FinishReason]:
    model = config.model
    return expected_output(
        command.prompt_token_ids,
        command.sampling_params,
        model.vocab_size,
        model.eos_token_ids,
        model.max_model_len,
    )


class RequestLog:
    """What an API server keeps of a request: the command, the output so far, how it ended."""

    def __init__(self, command: AddRequest) -> None:
        self.command = command
        self.output_token_ids: list[int] = list(command.output_token_ids)
        self.finish_reason: FinishReason | None = None
        self.error: ErrorCode | None = None
        self.error_message = ""
        self.is_aborted = False

    def apply(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "output after the end"
        assert not self.is_aborted, "output after an abort"
        assert output.first_index == len(self.output_token_ids), "a token was lost or came twice"
        self.output_token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.error = output.error
        self.error_message = output.error_message
        if output.finish_reason is FinishReason.STOP:
            assert output.stop_token_id == self.output_token_ids[-1]


class SchedulerHarness:
    """One engine and one worker, and the logs of all requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.scheduler = make_scheduler(config)
        self.oracle = make_oracle(config)
        self.results: deque[bytes] = deque()
        self.logs: dict[str, RequestLog] = {}
        self.frames: list[bytes] = []  # all steps, as they went to the worker
        self.events: list[tuple[str, AddRequest | Sequence[str] | None]] = []

    # Events

    def add(self, command: AddRequest) -> RequestLog:
        """Add a request, new or sent again; a live id changes nothing."""
        self.events.append(("add", command))
        is_live = command.request_id in self.scheduler.requests
        output = self.scheduler.add(command)
        if is_live:
            assert output is None
        else:
            log = self.logs[command.request_id] = RequestLog(command)
            if output is not None:
                log.apply(output)
        self.check_state()
        return self.logs[command.request_id]

    def new(self, request_id: str, prompt: Sequence[int], arrival_time_s: float = 0.0, **params: object) -> RequestLog:
        """Add a request by its essentials."""
        sampling_params = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
        return self.add(AddRequest(request_id, list(prompt), sampling_params, arrival_time_s))

    def abort(self, request_ids: Sequence[str]) -> None:
        self.events.append(("abort", list(request_ids)))
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            if request_id in self.logs:
                self.logs[request_id].is_aborted = True
        self.check_state()

    def schedule(self) -> SchedulerOutput | None:
        """Schedule a step and have the worker run it; its result waits to be delivered."""
        self.events.append(("schedule", None))
        before = list(self.scheduler.running)
        num_preemptions = self.scheduler.counters.num_preemptions
        step = self.scheduler.schedule()
        has_preempted = self.scheduler.counters.num_preemptions > num_preemptions
        self.check_running(before, has_preempted)
        if step is not None:
            self.check_step(step, has_preempted)
            frame = encode(step)
            self.frames.append(frame)
            self.results.append(encode(self.oracle.execute(decode_scheduler_output(frame))))
        self.check_state()
        return step

    def deliver(self) -> None:
        """Apply the oldest result that waits."""
        self.events.append(("deliver", None))
        result = decode_worker_event(self.results.popleft())
        assert isinstance(result, ModelRunnerOutput)
        for output in self.scheduler.update(result):
            self.logs[output.request_id].apply(output)
        self.check_state()

    def restart(self) -> None:
        """Lose engine and worker, start both again, and send every live request again with its output so far."""
        self.scheduler = make_scheduler(self.config)
        self.oracle = make_oracle(self.config)
        self.results.clear()
        live_logs = self.live_logs()
        for log in live_logs:
            del self.logs[log.command.request_id]
        for log in live_logs:
            command = log.command
            self.add(
                AddRequest(
                    command.request_id,
                    command.prompt_token_ids,
                    command.sampling_params,
                    command.arrival_time_s,
                    list(log.output_token_ids),
                    command.priority,
                )
            )

    def run(self) -> None:
        """Go on until every request has ended, with as many steps in flight as allowed."""
        for _ in range(MAX_STEPS_OF_A_RUN):
            if not self.has_work():
                break
            while self.can_schedule() and self.schedule() is not None:
                pass
            assert self.results, "there are requests, but nothing happens any more"
            self.deliver()
        assert not self.has_work()
        self.scheduler.check_idle()

    # What a test asks

    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self.results)

    def can_schedule(self) -> bool:
        return len(self.results) < self.config.scheduler.max_steps_in_flight

    def live_logs(self) -> list[RequestLog]:
        return [log for log in self.logs.values() if log.finish_reason is None and not log.is_aborted]

    def never_fits(self, command: AddRequest) -> bool:
        """The rule, worked out apart from the scheduler: the last token of a request takes no slot."""
        num_prompt_tokens = len(command.prompt_token_ids)
        num_tokens = min(num_prompt_tokens + command.sampling_params.max_tokens, self.config.model.max_model_len)
        num_slots = self.config.cache.block_size * self.scheduler.kv_cache_manager.num_total_blocks
        return num_prompt_tokens > self.config.model.max_model_len - 1 or num_tokens - 1 > num_slots

    def check_outputs(self) -> None:
        """After `run`: every request that was not aborted has the output that it must have, whatever the load was."""
        for log in self.logs.values():
            if log.is_aborted:
                continue
            if self.never_fits(log.command):
                assert (log.finish_reason, log.error) == (FinishReason.ERROR, ErrorCode.NEVER_FITS)
            else:
                assert (log.output_token_ids, log.finish_reason) == expected(self.config, log.command)

    # Invariants

    def check_state(self) -> None:
        """What holds between any two events."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        manager.check()
        tables = manager.block_tables
        block_ids = [block_id for table in tables.values() for block_id in table]
        assert len(block_ids) == len(set(block_ids)), "a block is in two places"
        assert manager.num_free_blocks + len(block_ids) == manager.num_total_blocks
        assert len(scheduler.running) <= self.config.scheduler.max_num_seqs
        assert list(tables) == [] or set(tables) == {request.request_id for request in scheduler.running}
        assert [request.order for request in scheduler.running] == sorted(r.order for r in scheduler.running)
        waiting = set(scheduler.waiting.members)
        assert waiting | set(tables) == set(scheduler.requests)
        assert not waiting & set(tables)
        for request in scheduler.requests.values():
            self._check_request(request, tables.get(request.request_id))
        assert {log.command.request_id for log in self.live_logs()} == set(scheduler.requests)

    def _check_request(self, request: Request, table: list[int] | None) -> None:
        assert 0 <= request.num_computed_tokens <= request.num_tokens <= request.max_num_tokens
        assert 0 <= request.num_pending_tokens <= len(self.results)
        assert request.output_token_ids == self.logs[request.request_id].output_token_ids
        if table is None:
            assert request.num_computed_tokens == 0
        else:
            num_slots = len(table) * self.config.cache.block_size
            assert request.num_computed_tokens <= num_slots
            assert num_slots < request.num_tokens + self.config.cache.block_size, "blocks were taken too early"

    def check_running(self, before: list[Request], has_preempted: bool) -> None:
        """Who was preempted is younger than everyone who still runs; so the oldest never is, unless it is alone."""
        after = self.scheduler.running
        lost = [request for request in before if request not in after]
        assert has_preempted == bool(lost)
        if lost:
            assert after, "everyone was preempted"
            assert max(request.order for request in after) < min(request.order for request in lost)

    def check_step(self, step: SchedulerOutput, has_preempted: bool) -> None:
        """Budget, chunk, rows and first come first served."""
        config = self.config.scheduler
        num_tokens = step.num_scheduled_tokens.values()
        assert num_tokens
        assert sum(num_tokens) <= config.max_num_batched_tokens
        assert max(num_tokens) <= (config.max_tokens_per_request or config.max_num_batched_tokens)
        assert set(step.num_scheduled_tokens) <= {request.request_id for request in self.scheduler.running}
        admitted = [self.scheduler.requests[new.request_id] for new in step.new_requests]
        head = self.scheduler.waiting.peek()
        if admitted:
            assert not has_preempted, "a step that preempts admits nobody"
            assert [r.order for r in admitted] == sorted(r.order for r in admitted)
        if head is not None and not has_preempted:
            assert all(request.order < head.order for request in admitted), "someone older still waits"
            assert not self._would_fit(head, sum(num_tokens)), "someone who fits was left waiting"

    def _would_fit(self, request: Request, num_scheduled_tokens: int) -> bool:
        config, manager = self.config.scheduler, self.scheduler.kv_cache_manager
        return (
            num_scheduled_tokens < config.max_num_batched_tokens
            and len(self.scheduler.running) < config.max_num_seqs
            and request.num_pending_tokens == 0
            and has_room(
                manager.num_blocks_for(request.num_tokens), manager.num_free_blocks, len(self.scheduler.running)
            )
        )

    def replay(self) -> list[bytes]:
        """The frames that the same events give on a fresh scheduler; not for harnesses that were restarted."""
        other = SchedulerHarness(self.config)
        for kind, argument in self.events:
            match kind, argument:
                case "add", AddRequest():
                    other.add(argument)
                case "abort", list():
                    other.abort(argument)
                case "schedule", _:
                    other.schedule()
                case _:
                    other.deliver()
        return other.frames
