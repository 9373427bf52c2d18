"""Block tables of both tiers: what is found, shared, copied, swapped, evicted and forgotten."""

from collections import Counter

from scheduler_harness import make_config

from octavo.engine_core.block_hash import hash_root
from octavo.engine_core.kv_cache_manager import NO_PREFIX, KVCacheManager, SharedBlock
from octavo.engine_core.request import Request
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CopyKind

MODEL = make_config().model
BLOCK = 2


def make_request(request_id, tokens, salt=""):
    command = AddRequest(request_id, list(tokens), SamplingParams(max_tokens=99), 0.0)
    return Request(command, (0, 0.0, 1, 0), MODEL, hash_root("model", "", salt))


def start(manager, request_id, tokens, salt=""):
    """Admit a request and compute all of its prompt."""
    request = make_request(request_id, tokens, salt)
    manager.update_hashes(request)
    prefix = manager.find_prefix(request)
    table = manager.add_table(request, prefix, request.num_tokens)
    assert table is not None
    request.num_computed_tokens = request.num_tokens
    manager.register_blocks(request, request.num_computed_tokens)
    return request, prefix


def found(manager, tokens, salt=""):
    request = make_request("asks", tokens, salt)
    manager.update_hashes(request)
    return manager.find_prefix(request)


def test_an_equal_beginning_is_shared_and_the_last_token_never():
    manager = KVCacheManager(8, BLOCK)
    start(manager, "a", range(6))
    for num_tokens, num_found in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4), (7, 6), (9, 6)):
        assert found(manager, range(num_tokens)).num_tokens == num_found
    _, prefix = start(manager, "b", [0, 1, 2, 3, 9])
    assert prefix == ([SharedBlock(0), SharedBlock(1)], 4)
    assert manager.block_tables == {"a": [0, 1, 2], "b": [0, 1, 3]}
    assert manager.device_pool.num_references[:4] == [2, 2, 1, 1]
    manager.free("a")
    assert manager.device_pool.num_references[:4] == [1, 1, 0, 1]
    assert list(manager.device_pool.cached) == [2]
    manager.check()


def test_nothing_is_shared_with_another_salt_or_without_a_cache():
    manager = KVCacheManager(8, BLOCK)
    start(manager, "a", range(4), salt="mine")
    assert found(manager, range(5), salt="mine").num_tokens == 4
    assert found(manager, range(5), salt="other") == NO_PREFIX
    manager = KVCacheManager(8, BLOCK, enable_prefix_caching=False)
    start(manager, "a", range(4))
    assert found(manager, range(5)) == NO_PREFIX
    manager.free("a")
    assert not manager.device_pool.cached


def test_blocks_are_found_as_far_as_they_are_computed():
    manager = KVCacheManager(8, BLOCK)
    request = make_request("a", range(6))
    manager.update_hashes(request)
    manager.add_table(request, NO_PREFIX, 6)
    for num_computed_tokens, num_found in ((0, 0), (1, 0), (2, 2), (3, 2), (5, 4), (6, 6)):
        manager.register_blocks(request, num_computed_tokens)
        assert found(manager, range(9)).num_tokens == num_found


def test_the_cache_gives_way_the_longest_unused_first_and_the_deepest_of_a_table_first():
    manager = KVCacheManager(6, BLOCK)
    start(manager, "old", [1, 1, 2, 2, 3, 3])
    start(manager, "new", [4, 4, 5, 5])
    manager.free("old")
    manager.free("new")
    lengths = []
    for number in range(6):
        lengths.append((found(manager, [1, 1, 2, 2, 3, 3, 0]).num_tokens, found(manager, [4, 4, 5, 5, 0]).num_tokens))
        manager.add_table(make_request(f"r{number}", [9]), NO_PREFIX, 1)
    assert lengths == [(6, 4), (6, 4), (4, 4), (2, 4), (0, 4), (0, 2)]


def test_a_hit_makes_a_cached_block_young_again():
    manager = KVCacheManager(3, BLOCK)
    for name, token_id in (("a", 1), ("b", 2), ("c", 3)):
        start(manager, name, [token_id] * BLOCK)
        manager.free(name)
    request = make_request("again", [1, 1, 7])
    manager.update_hashes(request)
    manager.add_table(request, manager.find_prefix(request), 2)
    manager.free("again")
    manager.add_table(make_request("x", [9]), NO_PREFIX, 1)
    assert [found(manager, [token_id] * 3).num_tokens for token_id in (1, 2, 3)] == [2, 0, 2]


def test_taking_fresh_blocks_does_not_evict_the_prefix_itself():
    manager = KVCacheManager(4, BLOCK)
    start(manager, "a", range(8))
    manager.free("a")
    _, prefix = start(manager, "b", [0, 1, 2, 3, 7, 7, 7, 7])
    assert [block.block_id for block in prefix.blocks] == manager.block_tables["b"][:2]
    assert len(set(manager.block_tables["b"])) == 4
    assert found(manager, [0, 1, 2, 3, 9]).num_tokens == 4


def test_a_table_that_does_not_fit_changes_nothing():
    manager = KVCacheManager(4, BLOCK, 4)
    start(manager, "a", range(5))
    request = make_request("b", [0, 1, 8, 8, 8])
    manager.update_hashes(request)
    prefix = manager.find_prefix(request)
    assert manager.num_blocks_to_take(prefix, 5) == 2
    assert manager.add_table(request, prefix, 5) is None
    assert manager.device_pool.num_references == [1, 1, 1, 0]
    assert manager.add_table(request, prefix, 4) == [0, 3]
    manager.check()


def test_a_cached_block_of_a_prefix_counts_as_taken():
    """It is free until then."""
    manager = KVCacheManager(4, BLOCK)
    start(manager, "a", range(4))
    prefix = found(manager, range(5))
    assert manager.num_blocks_to_take(prefix, 5) == 1
    manager.free("a")
    assert manager.num_blocks_to_take(prefix, 5) == 3


def test_a_fork_shares_full_blocks_and_copies_the_partial_one():
    manager = KVCacheManager(8, 4)
    start(manager, "a", range(10))
    fork = make_request("b", range(10))
    assert manager.add_table(fork, manager.find_fork("a", 10), 10) == [0, 1, 3]
    assert manager.take_copies() == [(CopyKind.DEVICE, 2, 3)]
    assert manager.device_pool.num_references[:4] == [2, 2, 1, 1]
    other = make_request("c", range(10))
    assert manager.add_table(other, manager.find_fork("a", 8), 12) == [0, 1, 4]
    assert manager.take_copies() == []
    for name in ("a", "b", "c"):
        manager.check()
        manager.free(name)
    assert manager.num_used_blocks == 0


def test_swapped_blocks_come_back_by_copy_only_when_the_device_lost_them():
    manager = KVCacheManager(4, BLOCK, 8)
    request, _ = start(manager, "a", range(5))
    assert manager.swap_out(request)
    assert (manager.host_tables, manager.block_tables) == ({"a": [0, 1, 2]}, {})
    assert manager.take_copies() == [(CopyKind.SWAP_OUT, block, block) for block in range(3)]
    manager.add_table(make_request("b", [9]), NO_PREFIX, 6)  # takes 3, 2 (free), and 1, the deepest cached one
    prefix = manager.find_swapped(request)
    assert prefix.blocks == [SharedBlock(0), SharedBlock(1, CopyKind.SWAP_IN), SharedBlock(2, CopyKind.SWAP_IN)]
    assert prefix.num_tokens == 5
    manager.free("b")
    table = manager.add_table(request, prefix, 5)
    manager.free_host("a")
    assert manager.take_copies() == [(CopyKind.SWAP_IN, 1, table[1]), (CopyKind.SWAP_IN, 2, table[2])]
    assert manager.host_pool.num_held_blocks == 0
    assert list(manager.host_pool.cached) == [1, 0], "what has a name stays on the host"
    manager.check()


def test_a_swapped_request_does_not_share_a_block_that_it_has_yet_to_fill():
    """Another one computed the whole block meanwhile; but the request will write into it."""
    manager = KVCacheManager(8, BLOCK, 8)
    request = make_request("a", range(5))
    manager.update_hashes(request)
    manager.add_table(request, NO_PREFIX, 5)
    request.num_computed_tokens = 3
    manager.register_blocks(request, 3)
    assert manager.swap_out(request)
    start(manager, "b", range(5))
    assert manager.find_swapped(request) == ([SharedBlock(0), SharedBlock(1, CopyKind.SWAP_IN)], 3)


def test_what_is_on_the_host_already_is_not_copied_there_again():
    manager = KVCacheManager(8, BLOCK, 8)
    one, _ = start(manager, "a", [0, 1, 2, 3, 4])
    other, _ = start(manager, "b", [0, 1, 2, 3, 5])
    assert manager.swap_out(one)
    assert manager.swap_out(other)
    assert manager.host_tables == {"a": [0, 1, 2], "b": [0, 1, 3]}
    assert manager.host_pool.num_references[:4] == [2, 2, 1, 1]
    assert manager.num_swapped_out_blocks == len(manager.take_copies()) == 4
    manager.check()


def test_a_full_host_refuses_and_changes_nothing():
    manager = KVCacheManager(8, BLOCK, 2)
    request, _ = start(manager, "a", range(5))
    assert not manager.swap_out(request)
    assert (manager.host_tables, manager.take_copies()) == ({}, [])
    assert manager.block_tables == {"a": [0, 1, 2]}
    manager.check()
    request.num_computed_tokens = 4
    assert manager.swap_out(request), "only computed tokens are worth a block"
    other, _ = start(manager, "b", [8, 8])
    assert not manager.swap_out(other)


def test_idle_host_blocks_that_a_swap_uses_are_not_counted_as_room():
    """Two blocks on the host are the request's own; the third has no place."""
    manager = KVCacheManager(8, BLOCK, 2)
    request, _ = start(manager, "a", range(4))
    assert manager.swap_out(request)
    manager.free_host("a")
    longer, _ = start(manager, "b", range(6))
    assert not manager.swap_out(longer)
    manager.check()
    longer.num_computed_tokens = 4
    assert manager.swap_out(longer)
    assert manager.host_tables == {"b": [0, 1]}


def test_a_request_without_computed_tokens_is_not_swapped():
    manager = KVCacheManager(8, BLOCK, 2)
    request = make_request("a", [1])
    manager.add_table(request, NO_PREFIX, 1)
    assert not manager.swap_out(request)


def test_evicted_blocks_are_offloaded_before_anything_overwrites_them():
    manager = KVCacheManager(2, BLOCK, 4, enable_offload=True)
    start(manager, "a", range(4))
    manager.free("a")
    manager.take_copies()
    start(manager, "b", [7, 7, 8, 8])
    assert manager.take_copies() == [(CopyKind.SWAP_OUT, 1, 0), (CopyKind.SWAP_OUT, 0, 1)]
    manager.free("b")
    _, prefix = start(manager, "c", [0, 1, 2])
    assert prefix.blocks == [SharedBlock(1, CopyKind.SWAP_IN)]
    copies = manager.take_copies()
    assert copies[:2] == [(CopyKind.SWAP_OUT, 0, 2), (CopyKind.SWAP_OUT, 1, 3)]
    assert copies[2:] == [(CopyKind.SWAP_IN, 1, manager.block_tables["c"][0])]
    manager.check()


def test_an_evicted_block_that_is_on_the_host_is_not_copied_again():
    manager = KVCacheManager(1, BLOCK, 4, enable_offload=True)
    for _ in range(3):
        start(manager, "a", [1, 1])
        manager.free("a")
        start(manager, "b", [2, 2])
        manager.free("b")
    assert Counter(manager.take_copies()) == {(CopyKind.SWAP_OUT, 0, 0): 1, (CopyKind.SWAP_OUT, 0, 1): 1}


def test_a_host_full_of_swapped_requests_takes_no_evicted_block():
    manager = KVCacheManager(2, BLOCK, 1, enable_offload=True)
    request, _ = start(manager, "a", [1, 1])
    assert manager.swap_out(request)
    manager.take_copies()
    start(manager, "b", [2, 2])
    manager.free("b")
    start(manager, "c", [3, 3, 4, 4])
    assert manager.take_copies() == []
    assert manager.host_tables == {"a": [0]}


def test_forgotten_blocks_are_found_in_no_tier():
    manager = KVCacheManager(8, BLOCK, 8)
    swapped, _ = start(manager, "a", range(5))
    assert manager.swap_out(swapped)
    start(manager, "b", range(5))
    manager.forget([manager.device_pool.block_hashes[block_id] for block_id in manager.block_tables["b"]])
    assert found(manager, range(9)) == NO_PREFIX
    manager.check()
    manager.free("b")
    manager.free_host("a")
    assert not manager.device_pool.cached
    assert not manager.host_pool.cached
    manager.check()


def test_a_failed_request_names_nothing():
    manager = KVCacheManager(8, BLOCK)
    request = make_request("a", range(4))
    manager.add_table(request, NO_PREFIX, 4)
    request.has_failed = True
    manager.update_hashes(request)
    manager.register_blocks(request, 4)
    assert request.block_hashes == []
    assert found(manager, range(9)) == NO_PREFIX
