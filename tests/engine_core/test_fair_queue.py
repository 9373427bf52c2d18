"""Turns among tenants: shares by weight, nobody held up for longer than a round, nothing saved up by being absent."""

import itertools
import random

import pytest
from scheduler_harness import make_config

from octavo.engine_core.request import Request
from octavo.engine_core.request_queue import QUANTUM_TOKENS, RequestQueue
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams

MODEL = make_config(max_model_len=100_000).model
_numbers = itertools.count(1)


def make_request(tenant, num_tokens, weight=1, priority=0):
    number = next(_numbers)
    command = AddRequest(
        f"{tenant}-{number}",
        [1] * num_tokens,
        SamplingParams(max_tokens=50_000),
        float(number),
        tenant=tenant,
        tenant_weight=weight,
    )
    return Request(command, (priority, float(number), number, 0), MODEL, b"root")


def push(queue, tenant, num_tokens, weight=1, priority=0):
    request = make_request(tenant, num_tokens, weight, priority)
    queue.push(request)
    return request


def admit(queue):
    request = queue.peek()
    assert queue.peek() is request, "who is next does not depend on how often one looks"
    queue.remove(request, is_admitted=True)
    return request


@pytest.mark.parametrize(("weight", "most_tokens"), [(1, 200), (3, 200), (3, 3000), (10, 5000)])
def test_tenants_that_always_wait_get_tokens_by_weight(weight, most_tokens):
    """At any time, not only in the end: the shares differ by no more than a quantum and a request each."""
    numbers, queue = random.Random(weight), RequestQueue()
    weights, tokens = {"light": 1, "heavy": weight}, {"light": 0, "heavy": 0}
    waiting = dict.fromkeys(weights, 0)
    for _ in range(3000):
        for tenant in weights:
            while waiting[tenant] < 2:
                push(queue, tenant, numbers.randint(1, most_tokens), weights[tenant])
                waiting[tenant] += 1
        request = admit(queue)
        waiting[request.tenant] -= 1
        tokens[request.tenant] += request.num_tokens
        assert abs(tokens["heavy"] / weight - tokens["light"]) <= 2 * QUANTUM_TOKENS + most_tokens * (1 + 1 / weight)
    assert tokens["heavy"] / tokens["light"] == pytest.approx(weight, rel=0.1)


def test_three_tenants_share_alike_whatever_the_sizes_of_their_requests():
    numbers, queue, tokens = random.Random(0), RequestQueue(), dict.fromkeys("abc", 0)
    sizes = {"a": (1, 20), "b": (100, 400), "c": (1500, 4000)}
    for tenant in sizes:
        push(queue, tenant, 5)
    for _ in range(20_000):
        request = admit(queue)
        tokens[request.tenant] += request.num_tokens
        push(queue, request.tenant, numbers.randint(*sizes[request.tenant]))
        if len(queue) < 6:
            push(queue, request.tenant, numbers.randint(*sizes[request.tenant]))
    assert max(tokens.values()) - min(tokens.values()) <= 2 * QUANTUM_TOKENS + 4000


def test_a_flood_of_one_tenant_delays_another_by_a_round_at_most():
    """100 requests for each of the other's: before each of those, the flood gets no more than its quantum."""
    queue = RequestQueue()
    for _ in range(2000):
        push(queue, "flood", 100)
    for _ in range(500):
        admit(queue)  # alone, it had its way
    for _ in range(10):
        mine = push(queue, "quiet", 100)
        num_tokens_before = 0
        while (request := admit(queue)) is not mine:
            num_tokens_before += request.num_tokens
        assert num_tokens_before <= QUANTUM_TOKENS


def test_a_long_request_waits_for_as_many_turns_as_it_has_quanta():
    queue = RequestQueue()
    long = push(queue, "long", 5 * QUANTUM_TOKENS)
    for _ in range(100):
        push(queue, "short", QUANTUM_TOKENS)
    order = [admit(queue) for _ in range(12)]
    assert 4 <= order.index(long) <= 6


def test_a_tenant_alone_is_never_held_up():
    queue = RequestQueue()
    requests = [push(queue, "only", 50_000) for _ in range(3)]
    assert [admit(queue) for _ in range(3)] == requests
    assert queue.peek() is None


def test_nothing_is_saved_up_by_being_absent():
    """A tenant that comes back has no more than a newcomer, however long the others were served meanwhile."""
    queue = RequestQueue()
    for _ in range(100):
        push(queue, "busy", QUANTUM_TOKENS // 2)
    push(queue, "comes and goes", 1)
    while admit(queue).tenant == "busy":
        pass
    for _ in range(50):
        admit(queue)
    for _ in range(8):
        push(queue, "comes and goes", QUANTUM_TOKENS // 2)
    tenants = [admit(queue).tenant for _ in range(8)]
    assert 3 <= tenants.count("busy") <= 5


def test_output_is_paid_for_when_it_is_known():
    """Equal prompts, but one tenant's requests end with 9 times as many tokens of output: it gets a tenth of them."""
    queue, num_admitted = RequestQueue(), {"long": 0, "short": 0}
    for tenant in num_admitted:
        for _ in range(1500):
            push(queue, tenant, 100)
    for _ in range(1000):
        request = admit(queue)
        num_admitted[request.tenant] += 1
        request.output_token_ids = [1] * (900 if request.tenant == "long" else 0)
        queue.charge(request)
    assert num_admitted["short"] / num_admitted["long"] == pytest.approx(10, rel=0.25)


def test_output_costs_nothing_when_nobody_else_waited():
    queue = RequestQueue()
    request = push(queue, "a", 10)
    admit(queue)
    request.output_token_ids = [1] * 50_000
    queue.charge(request)
    push(queue, "a", 10)
    push(queue, "b", 10)
    assert {admit(queue).tenant, admit(queue).tenant} == {"a", "b"}
    assert not queue._debts


def test_a_preempted_request_pays_once():
    """It comes back at its own place, and its tenant's savings are for the next one."""
    queue = RequestQueue()
    for _ in range(50):
        push(queue, "a", QUANTUM_TOKENS)
        push(queue, "b", QUANTUM_TOKENS)
    tokens = {"a": 0, "b": 0}
    preempted = set()
    while min(tokens.values()) < 20 * QUANTUM_TOKENS:
        request = admit(queue)
        if request.tenant == "a" and request.request_id not in preempted:
            preempted.add(request.request_id)
            request.num_preemptions += 1
            queue.push(request)
        else:
            tokens[request.tenant] += request.num_tokens
    assert max(tokens.values()) - min(tokens.values()) <= 2 * QUANTUM_TOKENS


def test_who_stands_aside_holds_nobody_up_and_comes_back_to_its_place():
    queue = RequestQueue()
    first, second, third = (push(queue, "", 5) for _ in range(3))
    queue.defer(first, b"soon")
    queue.defer(second, b"later")
    assert (len(queue), queue.peek()) == (3, third)
    queue.release_deferred(lambda awaited: awaited == b"later")
    assert (queue.peek(), list(queue.deferred)) == (first, [second.request_id])
    queue.release_deferred(lambda awaited: False)
    assert [admit(queue) for _ in range(3)] == [first, second, third]
    assert (len(queue), queue.deferred, queue.peek()) == (0, {}, None)


def test_a_request_that_stands_aside_can_be_removed():
    queue = RequestQueue()
    first, second = push(queue, "", 5), push(queue, "", 5)
    queue.defer(first, b"soon")
    queue.remove(first)
    queue.release_deferred(lambda awaited: False)
    assert (len(queue), queue.peek(), queue.deferred) == (1, second, {})


def test_only_the_most_urgent_priority_is_served_and_its_tenants_take_turns():
    queue = RequestQueue()
    for _ in range(40):
        push(queue, "a", 100, priority=1)
    for _ in range(20):
        push(queue, "a", 100, priority=0)
        push(queue, "b", 100, priority=0)
    urgent = [admit(queue) for _ in range(40)]
    assert all(request.order[0] == 0 for request in urgent)
    assert 5 <= [request.tenant for request in urgent[:20]].count("a") <= 15
    assert all(admit(queue).order[0] == 1 for _ in range(40))
