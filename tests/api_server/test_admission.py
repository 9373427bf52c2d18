"""The count of live requests and of waiting tokens: who is let in, and that everybody leaves."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.admission import Admission
from octavo.api_server.errors import ApiError


async def test_refuses_above_the_limit_and_admits_again() -> None:
    admission = Admission(2)
    with admission.enter(), admission.enter():
        assert not admission.idle.is_set()
        with pytest.raises(ApiError) as refusal:
            admission.enter()
        assert refusal.value.status == 429
        assert refusal.value.headers == {"Retry-After": "1"}
    assert admission.idle.is_set()
    with admission.enter():
        assert admission.num_live_requests == 1


async def test_a_single_request_may_have_more_choices_than_the_limit() -> None:
    admission = Admission(2)
    with admission.enter() as ticket:
        ticket.grow(5)
        with pytest.raises(ApiError):
            admission.enter()
    assert admission.num_live_requests == 0


async def test_prompts_without_output_are_bounded_by_their_tokens() -> None:
    admission = Admission(100, max_queued_tokens=10)
    with admission.enter() as first:
        first.queue([4, 3])
        with admission.enter() as second, pytest.raises(ApiError) as refusal:
            second.queue([4])
        assert refusal.value.status == 429
        assert refusal.value.headers == {"Retry-After": "1"}
        assert all(number in refusal.value.message for number in ("7", "10"))
        assert admission.num_queued_tokens == 7
        first.start(0)
        first.start(0)
        assert admission.num_queued_tokens == 3
        with admission.enter() as second:
            second.queue([7])
            with pytest.raises(ApiError):  # before its body is read
                admission.enter()
        assert admission.num_queued_tokens == 3
    assert (admission.num_queued_tokens, admission.num_live_requests) == (0, 0)


async def test_a_prompt_above_the_bound_is_taken_when_nothing_else_waits() -> None:
    admission = Admission(100, max_queued_tokens=10)
    with admission.enter() as ticket:
        ticket.queue([1000])
        with pytest.raises(ApiError):
            admission.enter()
        ticket.start(0)
        with admission.enter() as other:
            other.queue([10])
    assert admission.num_queued_tokens == 0


async def test_without_a_known_bound_no_tokens_are_too_many() -> None:
    admission = Admission(100)
    with admission.enter() as first, admission.enter() as second:
        first.queue([10**9])
        second.queue([10**9])


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.lists(st.integers(0, 3), max_size=4)),
        max_size=20,
    )
)
async def test_tokens_are_given_back_on_every_way_out(requests: list[tuple[list[int], list[int]]]) -> None:
    admission = Admission(1000, max_queued_tokens=12)
    with contextlib.ExitStack() as stack:
        for prompt_lengths, started in requests:
            with contextlib.suppress(ApiError):
                ticket = stack.enter_context(admission.enter())
                ticket.queue(prompt_lengths)
                for prompt_index in started:
                    ticket.start(prompt_index)
            largest = max(sum(lengths) for lengths, _ in requests)
            assert 0 <= admission.num_queued_tokens <= max(12, largest)
    assert (admission.num_queued_tokens, admission.num_live_requests) == (0, 0)


@given(st.lists(st.integers(1, 6), max_size=30))
async def test_the_limit_holds_for_any_mix(sizes: list[int]) -> None:
    admission = Admission(10)
    tickets = []
    for size in sizes:
        try:
            ticket = admission.enter()
        except ApiError:
            continue
        tickets.append(ticket)
        try:
            ticket.grow(size)
        except ApiError:
            admission.leave(tickets.pop())
        assert admission.num_live_requests == sum(each.num_requests for each in tickets) <= 10
    for ticket in tickets:
        admission.leave(ticket)
    assert admission.num_live_requests == 0
    assert admission.idle.is_set()
