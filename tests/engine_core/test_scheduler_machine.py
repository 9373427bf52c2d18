"""The scheduler as a state machine, with the oracle as its worker: every interleaving gives the same tokens."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_harness import SchedulerHarness, make_config

from octavo.protocol.config import AdmissionPolicy, PreemptionMode, SchedulingPolicy
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams, EarlyStopping
from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams


@st.composite
def configs(draw):
    """Memory for one to a few requests: often enough to run some at a time, seldom enough for all of their output."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    return make_config(
        block_size=block_size,
        num_device_blocks=max(1, draw(st.integers(6, 48)) // block_size),
        max_model_len=draw(st.sampled_from([6, 20, 40])),
        vocab_size=draw(st.sampled_from([11, 10_007])),
        eos_token_ids=draw(st.sampled_from([(), (2,), (2, 5)])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 5, 16, 64])),
        max_tokens_per_request=draw(st.sampled_from([None, 1, 3])),
        max_steps_in_flight=draw(st.sampled_from([1, 2])),
        num_host_blocks=draw(st.sampled_from([0, 3, 40])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        kv_offload_bytes=draw(st.sampled_from([0, 1])),
        scheduling_policy=draw(st.sampled_from(SchedulingPolicy)),
        admission_policy=draw(st.sampled_from(AdmissionPolicy)),
        preemption_mode=draw(st.sampled_from(PreemptionMode)),
        max_prefill_share=draw(st.sampled_from([1.0, 0.5, 0.01])),
        max_preemptions_per_request=draw(st.sampled_from([1, 4])),
    )


@st.composite
def sampling_params(draw):
    max_tokens = draw(st.sampled_from([12, 1, 2, 5, 20]))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        choice_index=draw(st.integers(0, 1)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 10), max_size=2))),
        ignore_eos=draw(st.booleans()),
        num_logprobs=draw(st.sampled_from([NO_LOGPROBS, NO_LOGPROBS, 0, 3])),
        num_prompt_logprobs=draw(st.sampled_from([NO_LOGPROBS, NO_LOGPROBS, 0, 2])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs())
    def start(self, config):
        self.harness = SchedulerHarness(config)
        self.has_restarted = False

    def pick(self, data, logs):
        return data.draw(st.sampled_from(logs))

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=10), min_size=1, max_size=4),
        params=sampling_params(),
        arrival_time_s=st.integers(0, 3),
        priority=st.integers(0, 1),
        cache_salt=st.sampled_from(["", "", "salt"]),
        tenant=st.sampled_from(["", "", "other"]),
    )
    def add(self, prompts, params, arrival_time_s, priority, cache_salt, tenant):
        for prompt in prompts:
            self.harness.add(
                AddRequest(
                    self.next_id(),
                    prompt,
                    params,
                    float(arrival_time_s),
                    priority=priority,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    tenant_weight=2 if tenant else 1,
                )
            )

    @rule(
        prompt=st.lists(st.integers(0, 10), min_size=1, max_size=12),
        params=sampling_params(),
        num_choices=st.integers(2, 4),
    )
    def fork(self, prompt, params, num_choices):
        origin = self.next_id()
        for index in range(num_choices):
            choice = msgspec.structs.replace(params, choice_index=index)
            self.harness.add(AddRequest(self.next_id(), prompt, choice, 1.0, fork_of=origin if index else ""))

    @rule(
        prompt=st.lists(st.integers(0, 10), min_size=1, max_size=10),
        params=sampling_params(),
        num_beams=st.integers(1, 4),
        length_penalty=st.sampled_from([1.0, 0.0, -1.0, 2.0]),
        early_stopping=st.sampled_from(EarlyStopping),
    )
    def search(self, prompt, params, num_beams, length_penalty, early_stopping):
        beam_search = BeamSearchParams(num_beams, max(1, num_beams - 1), length_penalty, early_stopping)
        params = msgspec.structs.replace(params, num_logprobs=NO_LOGPROBS, num_prompt_logprobs=NO_LOGPROBS)
        self.harness.add(AddRequest(self.next_id(), prompt, params, 1.0, beam_search=beam_search))

    def next_id(self):
        return f"r{len(self.harness.logs)}"

    @precondition(lambda self: self.harness.logs)
    @rule(data=st.data())
    def abort(self, data):
        log = self.pick(data, list(self.harness.logs.values()))
        if log.finish_reason is None:
            self.harness.abort([log.command.request_id, "unknown", log.command.request_id])
        else:
            self.harness.scheduler.abort([log.command.request_id])

    @precondition(lambda self: self.harness.live_logs())
    @rule(data=st.data())
    def send_a_live_request_again(self, data):
        self.harness.add(self.pick(data, self.harness.live_logs()).command)

    @precondition(lambda self: self.harness.live_logs())
    @rule(data=st.data())
    def resume_from_an_earlier_token(self, data):
        """An API server that missed output aborts the request and sends it again with what it has."""
        log = self.pick(data, self.harness.live_logs())
        known = log.output_token_ids[: data.draw(st.integers(0, len(log.output_token_ids)))]
        self.harness.abort([log.command.request_id])
        self.harness.add(msgspec.structs.replace(log.command, output_token_ids=known))

    @precondition(lambda self: self.harness.can_schedule())
    @rule()
    def schedule(self):
        self.harness.schedule()

    @precondition(lambda self: self.harness.results)
    @rule()
    def deliver(self):
        self.harness.deliver()

    @precondition(lambda self: self.harness.scheduler.kv_cache_manager.host_pool.num_held_blocks)
    @rule(data=st.data())
    def spoil_a_host_block(self, data):
        """A bit flips in host memory; the worker notices when the block comes back."""
        held = [i for i, count in enumerate(self.harness.scheduler.kv_cache_manager.host_pool.num_references) if count]
        self.harness.spoil_host_block(self.pick(data, held))

    @rule(num_turns=st.integers(1, 12))
    def run_a_while(self, num_turns):
        for _ in range(num_turns):
            while self.harness.can_schedule() and self.harness.schedule() is not None:
                pass
            if self.harness.results:
                self.harness.deliver()

    @rule(is_wanted=st.sampled_from([False, False, False, True]))
    def restart(self, is_wanted):
        if is_wanted:
            self.harness.restart()
            self.has_restarted = True

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.run()
            self.harness.check_outputs()
            if not self.has_restarted and not self.harness.has_spoilt:
                assert self.harness.replay() == self.harness.frames


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
