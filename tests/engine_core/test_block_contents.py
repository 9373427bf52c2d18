"""Every block table reads the right content at any time, whatever was shared, forked, swapped, evicted or forgotten."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import make_config

from octavo.engine_core.block_hash import hash_root
from octavo.engine_core.kv_cache_manager import KVCacheManager
from octavo.engine_core.request import Request
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CopyKind

MODEL = make_config().model
BLOCK = 2


def make_request(request_id, tokens, salt):
    command = AddRequest(request_id, list(tokens), SamplingParams(max_tokens=99), 0.0)
    return Request(command, (0, 0.0, 1, 0), MODEL, hash_root("model", "", salt))


class ContentMachine(RuleBasedStateMachine):
    """A model of what every slot of both tiers holds: the token ids up to its own. Copies move it.

    A request computes a token by writing into its own block, which must not be anybody else's, and it reads all that
    it has computed before. `names` keeps the content that each block hash had when it was first seen.
    """

    @initialize(
        num_device_blocks=st.integers(2, 10),
        num_host_blocks=st.sampled_from([0, 2, 5, 12]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        enable_offload=st.booleans(),
    )
    def start(self, num_device_blocks, num_host_blocks, enable_prefix_caching, enable_offload):
        self.manager = KVCacheManager(
            num_device_blocks,
            BLOCK,
            num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
            enable_offload=enable_offload,
        )
        self.device = {block_id: [None] * BLOCK for block_id in range(num_device_blocks)}
        self.host = {block_id: [None] * BLOCK for block_id in range(num_host_blocks)}
        self.running = {}
        self.swapped = {}
        self.num_added = 0
        self.names = {}

    def pick(self, data, requests):
        return data.draw(st.sampled_from(list(requests.values())))

    def apply_copies(self):
        tiers = {
            CopyKind.SWAP_OUT: (self.device, self.host),
            CopyKind.SWAP_IN: (self.host, self.device),
            CopyKind.DEVICE: (self.device, self.device),
        }
        for kind, source, destination in self.manager.take_copies():
            sources, destinations = tiers[kind]
            destinations[destination] = list(sources[source])

    def compute(self, request, num_tokens):
        """The worker's part: copies first, then the slots of the new tokens are written."""
        self.apply_copies()
        table = self.manager.block_tables[request.request_id]
        tokens = tuple(request.token_ids(0, request.num_tokens))
        for position in range(request.num_computed_tokens, request.num_computed_tokens + num_tokens):
            block_id, offset = table[position // BLOCK], position % BLOCK
            assert self.manager.device_pool.num_references[block_id] == 1, "a shared block is written"
            self.device[block_id][offset] = tokens[: position + 1]
        request.num_computed_tokens += num_tokens
        self.manager.update_hashes(request)
        self.manager.register_blocks(request, request.num_computed_tokens)

    def new_request(self, tokens, salt):
        self.num_added += 1
        return make_request(f"r{self.num_added}", tokens, salt)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from(["", "", "s"]), data=st.data()
    )
    def add(self, tokens, salt, data):
        request = self.new_request(tokens, salt)
        self.manager.update_hashes(request)
        prefix = self.manager.find_prefix(request)
        num_free, num_to_take = self.manager.num_free_blocks, self.manager.num_blocks_to_take(prefix, len(tokens))
        table = self.manager.add_table(request, prefix, len(tokens))
        assert (table is None) == (num_to_take > num_free)
        if table is not None:
            assert num_free - self.manager.num_free_blocks == num_to_take
            self.running[request.request_id] = request
            request.num_computed_tokens = prefix.num_tokens
            self.compute(request, data.draw(st.integers(1, request.num_missing_tokens)))

    @precondition(lambda self: any(request.num_missing_tokens for request in self.running.values()))
    @rule(data=st.data())
    def go_on(self, data):
        behind = {name: request for name, request in self.running.items() if request.num_missing_tokens}
        request = self.pick(data, behind)
        self.compute(request, data.draw(st.integers(1, request.num_missing_tokens)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data, token_ids):
        request = self.pick(data, self.running)
        if self.manager.grow_table(request.request_id, request.num_tokens + len(token_ids)) is not None:
            request.output_token_ids += token_ids
            request.num_tokens += len(token_ids)
            self.compute(request, request.num_missing_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def fork(self, data, token_id):
        """Like a beam: all that the parent has computed, then a token of its own."""
        parent = self.pick(data, self.running)
        num_tokens = parent.num_computed_tokens
        self.apply_copies()
        fork = self.new_request([*parent.token_ids(0, num_tokens), token_id], "")
        fork.root_hash = parent.root_hash
        self.manager.update_hashes(fork)
        prefix = self.manager.find_fork(parent.request_id, num_tokens)
        if self.manager.add_table(fork, prefix, num_tokens + 1) is not None:
            self.running[fork.request_id] = fork
            fork.num_computed_tokens = num_tokens
            self.compute(fork, 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data):
        request = self.pick(data, self.running)
        table = list(self.manager.block_tables[request.request_id])
        if self.manager.swap_out(request):
            del self.running[request.request_id]
            self.swapped[request.request_id] = request
            assert request.request_id not in self.manager.block_tables
        else:
            assert self.manager.block_tables[request.request_id] == table

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        request = self.pick(data, self.swapped)
        prefix = self.manager.find_swapped(request)
        assert prefix.num_tokens == request.num_computed_tokens
        if self.manager.add_table(request, prefix, request.num_tokens) is not None:
            self.manager.free_host(request.request_id)
            del self.swapped[request.request_id]
            self.running[request.request_id] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data):
        request = self.pick(data, self.running)
        self.manager.free(request.request_id)
        del self.running[request.request_id]

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def free_host(self, data):
        request = self.pick(data, self.swapped)
        self.manager.free_host(request.request_id)
        del self.swapped[request.request_id]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def spoil(self, data):
        """What is forgotten may hold anything from now on, once nobody uses it; so its owner goes, too."""
        request = self.pick(data, self.running)
        table = list(self.manager.block_tables[request.request_id])
        self.manager.forget(filter(None, map(self.manager.device_pool.block_hashes.__getitem__, table)))
        self.free_now(request)
        for block_id in table:
            if not self.manager.device_pool.num_references[block_id]:
                assert self.manager.device_pool.block_hashes[block_id] is None
                self.device[block_id] = [None] * BLOCK

    def free_now(self, request):
        self.apply_copies()
        self.manager.free(request.request_id)
        del self.running[request.request_id]

    @rule()
    def step(self):
        self.apply_copies()

    @invariant()
    def every_table_reads_the_right_content(self):
        """Of the state that the pending copies lead to."""
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        copies = self.manager._copies
        device, host = dict(self.device), dict(self.host)
        for kind, source, destination in copies:
            content = (host if kind is CopyKind.SWAP_IN else device)[source]
            (host if kind is CopyKind.SWAP_OUT else device)[destination] = content
        for requests, tables, tier in (
            (self.running, self.manager.block_tables, device),
            (self.swapped, self.manager.host_tables, host),
        ):
            assert requests.keys() == tables.keys()
            for name, request in requests.items():
                tokens = tuple(request.token_ids(0, request.num_tokens))
                for position in range(request.num_computed_tokens):
                    content = tier[tables[name][position // BLOCK]][position % BLOCK]
                    assert content == tokens[: position + 1], f"{name} reads {content} at {position}"
        self.check_names(device, host)

    def check_names(self, device, host):
        """Whatever can be found by its name holds what the name says: one name, one content, full."""
        for pool, tier in ((self.manager.device_pool, device), (self.manager.host_pool, host)):
            for block_hash, block_id in pool.hash_to_block_id.items():
                content = tuple(tier[block_id])
                assert None not in content
                assert self.names.setdefault(block_hash, content) == content


TestContentMachine = ContentMachine.TestCase
TestContentMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
