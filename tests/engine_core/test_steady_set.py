"""The steady requests against a model that counts every one of them at every step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_harness import make_config

from octavo.engine_core.request import Request
from octavo.engine_core.steady_set import NOT_STEADY, SteadySet
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams

MODEL = make_config().model


def make_request(number, num_prompt_tokens=3):
    command = AddRequest(f"r{number}", [1] * num_prompt_tokens, SamplingParams(max_tokens=99), 0.0)
    request = Request(command, (0, 0.0, number, 0), MODEL, b"root")
    request.num_computed_tokens = num_prompt_tokens
    request.num_tokens = num_prompt_tokens + 1
    return request


class SteadySetMachine(RuleBasedStateMachine):
    """`lengths` is what each request has computed; `calls` is in how many steps each wants attention."""

    @initialize()
    def start(self):
        self.steady = SteadySet()
        self.requests = [make_request(number) for number in range(5)]
        self.lengths = dict.fromkeys(range(5), 3)
        self.calls = {}  # of members: number -> steps

    def pick(self, data, numbers):
        return data.draw(st.sampled_from(sorted(numbers)))

    @precondition(lambda self: len(self.calls) < 5)
    @rule(data=st.data(), num_steps=st.integers(0, 5))
    def join(self, data, num_steps):
        number = self.pick(data, set(range(5)) - self.calls.keys())
        self.steady.join(self.requests[number])
        self.steady.call_in(self.requests[number], num_steps)
        self.calls[number] = num_steps
        self.check_members()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def leave(self, data):
        number = self.pick(data, self.calls)
        self.steady.leave(self.requests[number])
        del self.calls[number]
        assert self.requests[number].settled_at == NOT_STEADY
        self.check_lengths([number])
        self.check_members()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def settle(self, data):
        number = self.pick(data, self.calls)
        self.steady.settle(self.requests[number])
        self.check_lengths([number])

    @rule(data=st.data(), num_rounds=st.integers(1, 4))
    def step(self, data, num_rounds):
        for _ in range(num_rounds):
            due = self.steady.due()
            assert [request.order[2] for request in due] == sorted(n for n, steps in self.calls.items() if steps == 0)
            self.check_lengths([request.order[2] for request in due])
            for request in due:
                number = request.order[2]
                if data.draw(st.booleans()):
                    self.calls[number] = data.draw(st.integers(1, 4))
                    self.steady.call_in(request, self.calls[number])
                else:
                    self.steady.leave(request)
                    del self.calls[number]
            self.steady.advance()
            for number in self.calls:
                self.lengths[number] += 1
                self.calls[number] -= 1

    def check_lengths(self, numbers):
        for number in numbers:
            assert self.requests[number].num_computed_tokens == self.lengths[number]
            assert self.requests[number].num_tokens == self.lengths[number] + 1

    def check_members(self):
        assert {request.order[2] for request in self.steady.members.values()} == self.calls.keys()
        assert len(self.steady) == len(self.calls)

    def teardown(self):
        for number in sorted(self.calls):
            self.steady.leave(self.requests[number])
        self.check_lengths(range(5))
        for _ in range(8):
            assert self.steady.due() == []
            self.steady.advance()
        assert not self.steady._calendar, "the calendar keeps requests that nobody will call"


TestSteadySetMachine = SteadySetMachine.TestCase
TestSteadySetMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_members_stand_in_the_order_in_which_they_joined():
    """The workers keep the same list: it is the batch order."""
    steady = SteadySet()
    requests = [make_request(number) for number in (4, 2, 7)]
    for request in requests:
        steady.join(request)
    steady.leave(requests[1])
    steady.join(requests[1])
    assert list(steady.members) == ["r4", "r7", "r2"]


def test_a_call_that_was_overtaken_is_not_answered():
    """A request left and came back before its first call was due: only the new one counts."""
    steady = SteadySet()
    request = make_request(1)
    steady.join(request)
    steady.call_in(request, 1)
    steady.leave(request)
    steady.join(request)
    steady.call_in(request, 2)
    steady.advance()
    assert steady.due() == []
    steady.advance()
    assert steady.due() == [request]


def test_a_request_that_left_and_came_back_for_the_same_step_is_called_once():
    steady = SteadySet()
    request = make_request(1)
    for _ in range(3):
        steady.join(request)
        steady.call_in(request, 1)
        steady.leave(request)
    steady.join(request)
    steady.call_in(request, 1)
    steady.advance()
    assert steady.due() == [request]
