"""The order in which requests wait.

Within a tenant: lower priority value first, then earlier arrival, then who came in first; so a preempted request
returns to its own place, before everyone younger. Among the tenants of one priority: deficit round robin (Shreedhar
and Varghese, 1996) in tokens. A tenant whose turn comes gets a quantum for each unit of its weight, and has its turn
as long as what it saved pays for its first request; output tokens are charged when they are known. A tenant alone
never waits for its turn.

A request may also be *deferred*: what it would compute is being computed for another request right now, so it stands
aside until that is done, and nobody behind it is held up. Invariant: `peek` changes nothing that a second `peek` does
not see. Rejected: a deque (a returning request is not always the oldest), and a share of each step per tenant, which
would need a decision about every running request in every step.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter

from octavo.engine_core.request import OrderKey, Request

MIN_ENTRIES_TO_COMPACT = 64
QUANTUM_TOKENS = 1024


class TenantQueue:
    """Waiting requests of one tenant and priority. A heap holds the order, a dict says which entries still count."""

    def __init__(self) -> None:
        self.members: dict[str, Request] = {}
        self._entries: list[tuple[OrderKey, int, Request]] = []  # the number keeps requests from being compared
        self._num_pushes = 0

    def push(self, request: Request) -> None:
        self.members[request.request_id] = request
        self._num_pushes += 1
        heapq.heappush(self._entries, (request.order, self._num_pushes, request))

    def first(self) -> Request:
        """The first member; there must be one."""
        while not self._is_member(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][-1]

    def first_few(self, num_requests: int) -> list[Request]:
        return heapq.nsmallest(num_requests, self.members.values(), key=attrgetter("order"))

    def remove(self, request: Request) -> None:
        del self.members[request.request_id]
        if len(self._entries) > max(2 * len(self.members), MIN_ENTRIES_TO_COMPACT):
            self._entries = [(member.order, index, member) for index, member in enumerate(self.members.values())]
            self._num_pushes = len(self._entries)
            heapq.heapify(self._entries)

    def _is_member(self, entry: tuple[OrderKey, int, Request]) -> bool:
        """Whether the entry still counts; an id that came back after an abort is another request."""
        return self.members.get(entry[-1].request_id) is entry[-1]


class FairQueue:
    """Waiting requests of one priority: tenants take turns. Only tenants with waiting requests are in the round."""

    def __init__(self, debts: dict[str, int]) -> None:
        self.tenants: OrderedDict[str, TenantQueue] = OrderedDict()  # the first has its turn
        self.savings: dict[str, int] = {}
        self.returning = TenantQueue()  # who ran before: preempted requests, and beams of searches that go on
        self.debts = debts  # output tokens that a tenant still has to pay for; shared by all priorities

    def is_empty(self) -> bool:
        return not self.tenants and not self.returning.members

    def push(self, request: Request) -> None:
        if request.was_admitted:
            self.returning.push(request)
            return
        if request.tenant not in self.tenants:
            self.tenants[request.tenant] = TenantQueue()
            self.savings[request.tenant] = 0
        self.tenants[request.tenant].push(request)

    def turn(self) -> TenantQueue:
        """Where the next request stands; there must be one. Who ran before has had its turn, and goes by age."""
        if self.returning.members and not self._is_first_older():
            return self.returning
        while len(self.tenants) > 1:
            tenant, queue = next(iter(self.tenants.items()))
            request = queue.first()
            if self.savings[tenant] >= cost(request):
                return queue
            self.tenants.move_to_end(tenant)
            self._pay_in(next(iter(self.tenants.values())).first())
        return next(iter(self.tenants.values()))

    def _is_first_older(self) -> bool:
        """Whether the one tenant that waits for its turn has waited longer than all who return."""
        if len(self.tenants) != 1:
            return False
        (queue,) = self.tenants.values()
        return queue.first().order < self.returning.first().order

    def _pay_in(self, request: Request) -> None:
        """A tenant's turn begins: it gets its quantum, of which it first pays its debt."""
        quantum = QUANTUM_TOKENS * request.tenant_weight
        debt = self.debts.pop(request.tenant, 0)
        paid = min(quantum, debt)
        if debt > paid:
            self.debts[request.tenant] = debt - paid
        self.savings[request.tenant] += quantum - paid

    def remove(self, request: Request, *, is_admitted: bool) -> None:
        if request.was_admitted and request.request_id in self.returning.members:
            self.returning.remove(request)
            return
        queue = self.tenants[request.tenant]
        queue.remove(request)
        if is_admitted:
            self.savings[request.tenant] = max(0, self.savings[request.tenant] - cost(request))
        if not queue.members:  # nothing is saved up by being absent, and nothing owed once nobody else waits
            del self.tenants[request.tenant], self.savings[request.tenant]
            if len(self.tenants) <= 1:
                self.debts.clear()


def cost(request: Request) -> int:
    """Tokens that the request's admission is charged: what it brings, once."""
    return 0 if request.num_preemptions else request.num_tokens


class RequestQueue:
    """All waiting requests, deferred ones included."""

    def __init__(self) -> None:
        self.members: dict[str, Request] = {}
        self.deferred: dict[str, tuple[object, Request]] = {}  # request_id -> what it waits for, request
        self._debts: dict[str, int] = {}
        self._levels: dict[int, FairQueue] = {}  # by priority

    def __len__(self) -> int:
        return len(self.members)

    def push(self, request: Request) -> None:
        self.members[request.request_id] = request
        self._enqueue(request)

    def peek(self) -> Request | None:
        """The next request, or None when nobody waits, or only for others."""
        return self._levels[min(self._levels)].turn().first() if self._levels else None

    def peek_few(self, num_requests: int) -> list[Request]:
        """The next request and those of its tenant that follow it."""
        return self._levels[min(self._levels)].turn().first_few(num_requests) if self._levels else []

    def remove(self, request: Request, *, is_admitted: bool = False) -> None:
        """Take a member out, wherever it stands."""
        del self.members[request.request_id]
        if self.deferred.pop(request.request_id, None) is None:
            self._dequeue(request, is_admitted=is_admitted)

    def charge(self, request: Request) -> None:
        """A request has ended: if tenants compete, its own owes its output."""
        if any(len(level.tenants) > 1 for level in self._levels.values()):
            self._debts[request.tenant] = self._debts.get(request.tenant, 0) + request.num_output_tokens

    def defer(self, request: Request, awaited: object) -> None:
        """Let a member stand aside until `release_deferred` finds that what it waits for is not awaited any more."""
        self._dequeue(request, is_admitted=False)
        self.deferred[request.request_id] = (awaited, request)

    def release_deferred(self, is_awaited: Callable[[object], bool]) -> None:
        """Put the deferred requests whose time has come back into their places."""
        released = [request for awaited, request in self.deferred.values() if not is_awaited(awaited)]
        for request in released:
            del self.deferred[request.request_id]
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._levels.setdefault(request.order[0], FairQueue(self._debts)).push(request)

    def _dequeue(self, request: Request, *, is_admitted: bool) -> None:
        level = self._levels[request.order[0]]
        level.remove(request, is_admitted=is_admitted)
        if level.is_empty():
            del self._levels[request.order[0]]
