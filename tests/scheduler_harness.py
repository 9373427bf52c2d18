"""The real scheduler with the oracle as its worker, on no clock, with every invariant checked after every event.

A test drives it by `add`, `abort`, `schedule`, `deliver`, `restart`; in between, results may lag behind as far as
`max_steps_in_flight` allows. Everything goes through the codec, so that messages are the values that a worker gets.
The log of events can be replayed, which must give the same frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
from oracle import OracleModel, expected_output
from oracle_beams import expected_beams
from scheduler_harness_log import RequestLog

from octavo.engine_core.request import Request, RequestStatus
from octavo.engine_core.scheduler import Scheduler
from octavo.protocol.codec import decode_scheduler_output, decode_worker_event, encode
from octavo.protocol.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    WeightsFormat,
)
from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput, WorkerReady

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
    max_prefill_share: float = 1.0,
    max_steps_in_flight: int = 2,
    num_host_blocks: int = 0,
    enable_prefix_caching: bool = True,
    kv_offload_bytes: int = 0,
    **scheduler: object,
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
        cache=CacheConfig(
            block_size=block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
            kv_offload_bytes=kv_offload_bytes,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            max_tokens_per_request=max_tokens_per_request,
            max_steps_in_flight=max_steps_in_flight,
            max_prefill_share=max_prefill_share,
            **scheduler,  # type: ignore[arg-type]
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
        config.cache.num_host_blocks or 0,
    )


def make_scheduler(config: EngineConfig) -> Scheduler:
    cache = config.cache
    return Scheduler(config, WorkerReady(0, cache.num_device_blocks or 0, cache.num_host_blocks or 0))


def expected_search(config: EngineConfig, command: AddRequest) -> list[tuple[list[int], float]]:
    """The beams that a search must return."""
    model, params, beam_search = config.model, command.sampling_params, command.beam_search
    assert beam_search is not None
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
    params = msgspec.structs.replace(params, num_candidates=max(2, 1 + len(ends)) * beam_search.num_beams)
    return expected_beams(
        command.prompt_token_ids, params, beam_search, model.vocab_size, model.eos_token_ids, model.max_model_len
    )


def expected(config: EngineConfig, command: AddRequest) -> tuple[list[int], FinishReason]:
    model = config.model
    return expected_output(
        command.prompt_token_ids,
        command.sampling_params,
        model.vocab_size,
        model.eos_token_ids,
        model.max_model_len,
    )


class SchedulerHarness:
    """One engine and one worker, and the logs of all requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.scheduler = make_scheduler(config)
        self.oracle = make_oracle(config)
        self.results: deque[bytes] = deque()
        self.logs: dict[str, RequestLog] = {}
        self.has_spoilt = False
        self.frames: list[bytes] = []  # all steps, as they went to the worker
        self.events: list[tuple[str, AddRequest | Sequence[str] | None]] = []

    # Events

    def add(self, command: AddRequest) -> RequestLog:
        """Add a request, new or sent again; a live id changes nothing."""
        self.events.append(("add", command))
        is_live = command.request_id in self.scheduler.requests or command.request_id in self.scheduler.beam_groups
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
            self.add(msgspec.structs.replace(log.command, output_token_ids=list(log.output_token_ids)))

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

    def spoil_host_block(self, block_id: int) -> None:
        """Change what a host block holds."""
        self.has_spoilt = True
        self.oracle.host_slots[block_id * self.oracle.block_size] ^= 1

    # What a test asks

    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self.results)

    def can_schedule(self) -> bool:
        return len(self.results) < self.config.scheduler.max_steps_in_flight

    def live_logs(self) -> list[RequestLog]:
        return [log for log in self.logs.values() if log.finish_reason is None and not log.is_aborted]

    def never_fits(self, command: AddRequest) -> bool:
        """The rule, worked out apart from the scheduler: the last token of a request takes no slot."""
        num_prompt_tokens, block_size = len(command.prompt_token_ids), self.config.cache.block_size
        max_model_len = max(self.config.model.max_model_len, num_prompt_tokens + 1)
        num_tokens = min(num_prompt_tokens + command.sampling_params.max_tokens, max_model_len)
        num_beams = 1 if command.beam_search is None else command.beam_search.num_beams
        num_blocks = num_beams * -(-(num_tokens - 1) // block_size)
        if self.config.cache.enable_prefix_caching:
            num_blocks -= (num_beams - 1) * ((num_prompt_tokens - 1) // block_size)
        return (
            num_prompt_tokens > self.config.model.max_model_len
            or num_blocks > self.scheduler.kv_cache_manager.num_total_blocks
            or num_beams > self.config.scheduler.max_num_seqs
        )

    def check_outputs(self) -> None:
        """After `run`: every request that was not aborted has the output that it must have, whatever the load was."""
        for log in self.logs.values():
            if log.is_aborted:
                continue
            if self.never_fits(log.command):
                assert (log.finish_reason, log.error) == (FinishReason.ERROR, ErrorCode.NEVER_FITS)
            elif log.command.beam_search is not None:
                assert log.beams == expected_search(self.config, log.command)
            else:
                assert (log.output_token_ids, log.finish_reason) == expected(self.config, log.command)
                log.check_logprobs(self.config.model.vocab_size)

    # Invariants

    def check_state(self) -> None:
        """What holds between any two events."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        manager.check()
        for request in scheduler.steady.members.values():
            scheduler.steady.settle(request)
        running = {request.request_id: request for request in scheduler.running}
        assert len(scheduler.running) <= self.config.scheduler.max_num_seqs
        assert manager.block_tables.keys() == running.keys()
        assert [request.order for request in scheduler.running] == sorted(r.order for r in scheduler.running)
        assert scheduler.steady.members.keys() <= running.keys()
        assert scheduler.catching_up.keys() <= running.keys()
        assert not scheduler.steady.members.keys() & scheduler.catching_up.keys()
        waiting = scheduler.waiting.members
        assert waiting.keys() | running.keys() == scheduler.requests.keys()
        assert not waiting.keys() & running.keys()
        swapped = {name for name, request in waiting.items() if request.status is RequestStatus.SWAPPED}
        assert manager.host_tables.keys() == swapped
        assert set(scheduler.admission.promises.makers.values()) <= scheduler.catching_up.keys()
        for request in scheduler.requests.values():
            self._check_request(request, manager.block_tables.get(request.request_id))
        named = {
            request.beam_group.request_id if request.beam_group else request.request_id
            for request in scheduler.requests.values()
        }
        assert {log.command.request_id for log in self.live_logs()} == named

    def _check_request(self, request: Request, table: list[int] | None) -> None:
        assert 0 <= request.num_computed_tokens <= request.num_tokens <= request.max_num_tokens
        if request.beam_group is None:
            assert 0 <= request.num_pending_tokens <= len(self.results)
            assert request.output_token_ids == self.logs[request.request_id].output_token_ids
        if table is None:
            assert request.num_computed_tokens == 0 or request.status is RequestStatus.SWAPPED
        else:
            block_size, pool = self.config.cache.block_size, self.scheduler.kv_cache_manager.device_pool
            num_slots = len(table) * block_size
            assert request.num_computed_tokens <= num_slots
            assert num_slots < request.num_tokens + block_size, "blocks were taken too early"
            to_be_written = table[request.num_computed_tokens // block_size :]
            assert all(pool.num_references[block_id] == 1 for block_id in to_be_written), "a shared block is written"

    def check_running(self, before: list[Request], has_preempted: bool) -> None:
        """Who was preempted is younger than everyone who still runs; so the oldest never is, unless it is alone."""
        after = self.scheduler.running
        lost = [request for request in before if request not in after]
        if not self.scheduler.beam_groups:  # beams may be preempted and admitted again within a step
            assert has_preempted == bool(lost)
        stayed = [request.order for request in before if request in after]
        if lost and stayed:
            assert max(stayed) < min(request.order for request in lost)
        if lost and self.scheduler.steps_in_flight and not self.scheduler.beam_groups:
            assert after, "everyone was preempted"

    def check_step(self, step: SchedulerOutput, has_preempted: bool) -> None:
        """Budget, chunk, rows and first come first served."""
        config = self.config.scheduler
        num_tokens = step.num_scheduled_tokens.values()
        num_scheduled_tokens = sum(num_tokens) + len(self.scheduler.steady)
        assert 0 < num_scheduled_tokens <= config.max_num_batched_tokens
        assert max(num_tokens, default=1) <= (config.max_tokens_per_request or config.max_num_batched_tokens)
        assert set(step.num_scheduled_tokens) <= {request.request_id for request in self.scheduler.running}
        is_fork = {request_id for request_id in step.num_scheduled_tokens if "/" in request_id}
        admitted = [
            self.scheduler.requests[new.request_id] for new in step.new_requests if new.request_id not in is_fork
        ]
        if self.scheduler.beam_groups or config.scheduling_policy is SchedulingPolicy.LONGEST_PREFIX:
            return
        head = self.scheduler.waiting.peek()
        if admitted:
            assert not has_preempted, "a step that preempts admits nobody"
        if self.has_one_tenant:
            assert [r.order for r in admitted] == sorted(r.order for r in admitted)
        if head is not None and not has_preempted:
            if self.has_one_tenant:
                assert all(request.order < head.order for request in admitted), "someone older still waits"
            assert not self._would_fit(head, num_scheduled_tokens), "someone who fits was left waiting"

    def _would_fit(self, request: Request, num_scheduled_tokens: int) -> bool:
        scheduler, config = self.scheduler, self.config.scheduler
        admission = scheduler.admission
        return (
            num_scheduled_tokens < config.max_num_batched_tokens
            and len(scheduler.running) < config.max_num_seqs
            and request.num_pending_tokens == 0
            and config.max_prefill_share == 1
            and admission._has_room(scheduler.plan, request, admission._find_prefix(request))
        )

    @property
    def has_one_tenant(self) -> bool:
        return len({log.command.tenant for log in self.logs.values()}) <= 1

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
