"""The count of live requests: who is let in, and that everybody leaves."""

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
