"""The order of waiting, against a sorted list, and what an abort storm leaves behind."""

from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import make_config

from octavo.engine_core.request import Request
from octavo.engine_core.request_queue import MIN_ENTRIES_TO_COMPACT, RequestQueue
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams

MODEL = make_config().model


def make_request(request_id, sequence_number, arrival_time_s=0.0, priority=0):
    command = AddRequest(request_id, [1], SamplingParams(max_tokens=1), arrival_time_s, priority=priority)
    return Request(command, (priority, arrival_time_s, sequence_number, 0), MODEL, b"root")


def drain(queue):
    request_ids = []
    while (request := queue.peek()) is not None:
        request_ids.append(request.request_id)
        queue.remove(request)
    return request_ids


def test_order_is_priority_then_arrival_then_who_came_in_first():
    queue = RequestQueue()
    for request in (
        make_request("late", 1, arrival_time_s=9.0),
        make_request("tie 2", 3, arrival_time_s=5.0),
        make_request("tie 1", 2, arrival_time_s=5.0),
        make_request("urgent", 4, arrival_time_s=10.0, priority=-1),
        make_request("early", 5, arrival_time_s=1.0),
    ):
        queue.push(request)
    assert drain(queue) == ["urgent", "early", "tie 1", "tie 2", "late"]


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3)), max_size=20), st.data())
def test_any_mix_of_pushes_and_removals_keeps_the_order(keys, data):
    queue, model = RequestQueue(), []
    for number, (priority, arrival_time_s) in enumerate(keys):
        request = make_request(f"r{number}", number, float(arrival_time_s), priority)
        queue.push(request)
        model.append(request)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(model))
            model.remove(gone)
            queue.remove(gone)
            if data.draw(st.booleans()):  # as a preempted request does
                queue.push(gone)
                model.append(gone)
        model.sort(key=lambda request: request.order)
        assert len(queue) == len(model)
        assert queue.peek() is (model[0] if model else None)
    assert drain(queue) == [request.request_id for request in model]


def test_an_id_that_comes_back_after_an_abort_is_another_request():
    queue = RequestQueue()
    first, second = make_request("a", 1, arrival_time_s=1.0), make_request("a", 2, arrival_time_s=2.0)
    queue.push(first)
    queue.remove(first)
    queue.push(second)
    queue.push(make_request("b", 3, arrival_time_s=1.5))
    assert queue.peek().request_id == "b"
    assert drain(queue) == ["b", "a"]


def test_aborted_requests_are_not_kept_and_the_others_keep_their_order():
    queue = RequestQueue()
    stay = [make_request(f"stays {number}", number, arrival_time_s=float(number * 7 % 11)) for number in range(11)]
    for request in stay:
        queue.push(request)
    for number in range(11, 1000):
        request = make_request(f"r{number}", number, arrival_time_s=float(number % 13))
        queue.push(request)
        queue.remove(request)
    (level,) = queue._levels.values()
    assert len(level.tenants[""]._entries) <= MIN_ENTRIES_TO_COMPACT + 1
    assert drain(queue) == [request.request_id for request in sorted(stay, key=lambda request: request.order)]
