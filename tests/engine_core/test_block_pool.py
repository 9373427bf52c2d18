"""BlockPool as a state machine against a model of sets, and its promises one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import make_config

from octavo.engine_core.block_pool import BlockPool
from octavo.engine_core.invariants import InvariantError
from octavo.engine_core.kv_cache_manager import NO_PREFIX, KVCacheManager
from octavo.engine_core.request import Request
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.held = []
        self.num_most_held = 0

    @rule(num_blocks=st.integers(0, 6))
    def allocate(self, num_blocks):
        num_free = self.pool.num_free_blocks
        block_ids = self.pool.allocate(num_blocks)
        assert (block_ids is None) == (num_blocks > num_free)
        if block_ids is not None:
            assert len(block_ids) == num_blocks
            self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def conserves_blocks(self):
        self.pool.check()
        held = [block_id for block_ids in self.held for block_id in block_ids]
        assert len(held) == len(set(held))
        assert set(held) | set(self.pool.free_block_ids) == set(range(self.pool.num_blocks))
        assert len(held) + self.pool.num_free_blocks == self.pool.num_blocks
        assert all(self.pool.num_references[block_id] == 1 for block_id in held)

    @invariant()
    def leaves_memory_untouched_that_was_never_needed(self):
        held = [block_id for block_ids in self.held for block_id in block_ids]
        self.num_most_held = max(self.num_most_held, len(held))
        assert all(block_id < self.num_most_held for block_id in held)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_come_in_order_and_freed_ones_come_first():
    pool = BlockPool(8)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([1, 2])
    assert pool.allocate(3) == [1, 2, 4]


def test_a_request_for_too_many_takes_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [2]
    assert pool.allocate(0) == []


def test_freeing_twice_is_found_at_once():
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(InvariantError, match="block 0 freed twice"):
        pool.free([block_id])


def test_a_block_is_free_when_the_last_reference_goes():
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1)
    pool.num_references[block_id] = 2
    pool.free([block_id])
    assert pool.num_free_blocks == 2
    pool.free([block_id])
    assert pool.num_free_blocks == 3
    pool.check()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool.free_block_ids.append(pool.free_block_ids[0]),
        lambda pool: pool.free_block_ids.pop(),
        lambda pool: pool.free_block_ids.append(0),
        lambda pool: pool.num_references.__setitem__(3, 1),
    ],
)
def test_check_sees_a_broken_pool(break_it):
    pool = BlockPool(4)
    pool.allocate(1)
    pool.check()
    break_it(pool)
    with pytest.raises(InvariantError):
        pool.check()


def make_request(request_id):
    command = AddRequest(request_id, [1], SamplingParams(max_tokens=1), 0.0)
    return Request(command, (0, 0.0, 1, 0), make_config().model, b"root")


def add_table(manager, request_id, num_tokens):
    return manager.add_table(make_request(request_id), NO_PREFIX, num_tokens)


def test_tables_grow_on_demand_and_go_back_whole():
    manager = KVCacheManager(num_device_blocks=4, block_size=4)
    assert add_table(manager, "a", 5) == [0, 1]
    assert manager.grow_table("a", 8) == []
    assert manager.grow_table("a", 9) == [2]
    assert manager.block_tables == {"a": [0, 1, 2]}
    assert add_table(manager, "b", 5) is None
    assert manager.grow_table("a", 17) is None
    assert manager.block_tables == {"a": [0, 1, 2]}
    assert (manager.num_used_blocks, manager.num_free_blocks, manager.num_total_blocks) == (3, 1, 4)
    manager.check()
    manager.free("a")
    assert (manager.num_used_blocks, manager.block_tables) == (0, {})
    manager.check()


def test_the_manager_sees_a_table_that_names_what_it_does_not_hold():
    manager = KVCacheManager(num_device_blocks=4, block_size=4)
    add_table(manager, "a", 4)
    manager.block_tables["b"] = [0]
    with pytest.raises(InvariantError, match="tables name device block 0 2 times"):
        manager.check()


def test_a_request_has_one_table():
    manager = KVCacheManager(num_device_blocks=4, block_size=4)
    add_table(manager, "a", 4)
    with pytest.raises(InvariantError, match="a has a table already"):
        add_table(manager, "a", 4)
