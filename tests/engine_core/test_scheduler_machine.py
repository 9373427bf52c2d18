"""The scheduler as a state machine, with the oracle as its worker: every interleaving gives the same tokens."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_harness import SchedulerHarness, make_config

from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams


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
    )
    def add(self, prompts, params, arrival_time_s, priority):
        for prompt in prompts:
            request_id = f"r{len(self.harness.logs)}"
            self.harness.add(AddRequest(request_id, prompt, params, float(arrival_time_s), priority=priority))

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
        command = log.command
        self.harness.abort([command.request_id])
        self.harness.add(
            AddRequest(
                command.request_id,
                command.prompt_token_ids,
                command.sampling_params,
                command.arrival_time_s,
                known,
                command.priority,
            )
        )

    @precondition(lambda self: self.harness.can_schedule())
    @rule()
    def schedule(self):
        self.harness.schedule()

    @precondition(lambda self: self.harness.results)
    @rule()
    def deliver(self):
        self.harness.deliver()

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
            if not self.has_restarted:
                assert self.harness.replay() == self.harness.frames


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
