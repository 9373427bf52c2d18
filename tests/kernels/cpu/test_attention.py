"""Paged attention on the CPU against float64 over poisoned memory, and where its bits must not change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attention_cases import Case, Step, naive_attention
from cpu_attention import SCALE, CpuStep, attend, build_for_cpu, poisoned, write_tokens
from cpu_kernels import assert_same_bits
from kernel_checks import DTYPES, assert_close

from octavo.kernels.cpu.attention import cpu_paged_attention, cpu_plan_attention
from octavo.kernels.cpu.attention_plan import CHUNK_TOKENS, ITEMS_PER_THREAD, make_plan, plan_capacity
from octavo.kernels.cpu.execution import EXECUTOR, Executor
from octavo.kernels.ops.attention import BlockTables, HeadShape

RAGGED = Case([1, 1, 5, 1, 150, 1], [299, 12, 130, 0, 40, 700], num_kv_heads=3, group=3, head_dim=64)
LAYOUTS = [
    {"head_dim": 64, "block_size": 16},
    {"head_dim": 64, "block_size": 32, "is_first_block_shared": True},
    {"head_dim": 80, "block_size": 16},
    {"head_dim": 128, "block_size": 48},
    {"head_dim": 256, "block_size": 16, "num_kv_heads": 1},
    {"head_dim": 16, "block_size": 128, "group": 8},
    {"head_dim": 64, "block_size": 1},
    {"head_dim": 64, "block_size": 7},
    {"head_dim": 6, "block_size": 16},
    {"head_dim": 40, "block_size": 4, "group": 20},
]
LAYERS = [{}, {"window": 1}, {"window": 40}, {"window": 200}, {"soft_cap": 2.0}, {"is_fp8": True}]


def check(built: CpuStep) -> None:
    got = attend(built.step, built.options)
    assert_close(got, naive_attention(built.plain, SCALE, built.options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ragged_batches_of_any_layout(each_isa, layout: dict[str, int], dtype: torch.dtype) -> None:
    check(build_for_cpu(RAGGED._replace(dtype=dtype, **layout)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("block_size", [7, 16])
def test_layers_of_any_kind(each_isa, block_size: int, layer: dict[str, object], dtype: torch.dtype) -> None:
    check(build_for_cpu(RAGGED._replace(dtype=dtype, block_size=block_size, **layer)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[7], LAYOUTS[8]], ids=str)
@pytest.mark.parametrize("layer", [{}, {"window": 40}], ids=str)
def test_int8_caches(each_isa, layer: dict[str, int], layout: dict[str, int], dtype: torch.dtype) -> None:
    check(build_for_cpu(RAGGED._replace(dtype=dtype, **layout, **layer), is_int8=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_tiles_and_chunks(each_isa, dtype: torch.dtype) -> None:
    around = [end + more for end in (16, CHUNK_TOKENS, 2 * CHUNK_TOKENS) for more in (-1, 0, 1)]
    check(build_for_cpu(Case([1] * len(around), [end - 1 for end in around], group=2, head_dim=32, dtype=dtype)))
    check(build_for_cpu(Case(around[:6], [0, 1, 15, 16, 17, 127], group=2, head_dim=32, dtype=dtype)))


def test_large_scores_do_not_overflow(each_isa) -> None:
    built = build_for_cpu(RAGGED._replace(dtype=torch.bfloat16))
    got = cpu_paged_attention(*built.step, 40.0)
    assert_close(got, naive_attention(built.plain, 40.0))


def only(step: Step, rows: Sequence[int]) -> tuple[Step, torch.Tensor]:
    """The step with some requests of it, and where their tokens were."""
    starts = step.query_start_loc.tolist()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
    query_lens = [starts[row + 1] - starts[row] for row in rows]
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
    part = step._replace(
        query=step.query[tokens],
        query_start_loc=query_start_loc,
        seq_lens=step.seq_lens[list(rows)],
        block_tables=step.block_tables[list(rows)],
    )
    return part, tokens


KINDS = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "window": 40},
    {"dtype": torch.bfloat16, "is_fp8": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_request_has_the_same_bits_in_any_company(each_isa, kind: dict[str, object]) -> None:
    built = build_for_cpu(RAGGED._replace(**kind))
    together = attend(built.step, built.options)
    for num_threads in (1, 2):
        EXECUTOR.start(num_threads, each_isa.library.instruction_set)
        for rows in ([0], [1], [2], [3], [4], [5], [1, 0], [5, 3, 2, 0], [4, 1], [5] * 20):
            part, tokens = only(built.step, rows)
            assert_same_bits([attend(part, built.options)], [together[tokens]])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(each_isa, is_int8: bool, kind: dict[str, object]) -> None:
    """Token by token, in chunks and as a whole; the later tokens' slots are still poison when earlier ones run."""
    if is_int8 and "is_fp8" in kind:
        pytest.skip("a cache has one dtype")
    case = Case([300], [0], num_kv_heads=3, group=3, head_dim=64, **kind)
    built = build_for_cpu(case, is_int8)
    whole = attend(built.step, built.options)
    for chunk in (1, 7, 64, 140):
        kv_cache = poisoned(built.plain, built.step.kv_cache.dtype)
        for first in range(0, 300, chunk):
            last = min(first + chunk, 300)
            write_tokens(built.plain, kv_cache, 0, first, last, case.dtype, built.options)
            starts, seq_lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, last - first], [last]))
            part = Step(built.step.query[first:last], kv_cache, starts, seq_lens, built.step.block_tables)
            assert_same_bits([attend(part, built.options)], [whole[first:last]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_block_size_nor_block_ids_change_a_bit(each_isa, dtype: torch.dtype) -> None:
    cases = [RAGGED._replace(dtype=dtype, block_size=block_size) for block_size in (16, 1, 7, 512)]
    results = [attend(built.step, built.options) for built in map(build_for_cpu, cases)]
    for result in results[1:]:
        assert_same_bits([result], results[:1])


def test_a_recorded_command_serves_other_requests(executor) -> None:
    """Fewer requests, tokens and work than it was recorded with; the plan ends with a row of -1."""
    first = build_for_cpu(RAGGED._replace(dtype=torch.bfloat16)).step
    query = torch.empty_like(first.query)
    starts, seq_lens = torch.empty(7, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    tables, heads = torch.empty_like(first.block_tables), HeadShape(9, 3, 64)
    capacity = plan_capacity(6, 1000, heads)
    num_work = capacity.num_work + len(query)
    work, reductions = (torch.full((num, 4), -1, dtype=torch.int32) for num in (num_work, capacity.num_reductions))
    plan = make_plan(np.ones(1, np.int32), np.ones(1, np.int32), heads)._replace(
        work=work, reductions=reductions, num_partials=capacity.num_partials
    )
    with EXECUTOR.record(len(query)) as commands:
        out = cpu_paged_attention(query, first.kv_cache, starts, seq_lens, tables, SCALE, plan=plan)
    for rows in ([0, 1, 2, 3, 4, 5], [5], [4, 3], [2, 0, 5]):
        part, _ = only(first, rows)
        made = cpu_plan_attention(part.query_start_loc.diff().numpy(), part.seq_lens.numpy(), heads)
        work.fill_(-1)[: len(made.work)] = made.work
        reductions.fill_(-1)[: len(made.reductions)] = made.reductions
        query[: len(part.query)], tables[: len(rows)] = part.query, part.block_tables
        starts[: len(rows) + 1], seq_lens[: len(rows)] = part.query_start_loc, part.seq_lens
        commands.replay(len(part.query))
        assert_same_bits([out[: len(part.query)]], [cpu_paged_attention(*part, SCALE)])


def test_queries_may_lie_in_a_projection_and_out_may_be_given(each_isa) -> None:
    step = build_for_cpu(RAGGED).step
    projection = torch.randn(len(step.query), 15, 64)
    projection[:, :9] = step.query
    out = torch.full_like(step.query, torch.nan)
    result = cpu_paged_attention(projection[:, :9], *step[1:], SCALE, out)
    assert result is out
    assert_same_bits([out], [cpu_paged_attention(*step, SCALE)])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"query": torch.zeros(159, 9, 64, dtype=torch.bfloat16)}, "kv_cache of torch.float32"),
        ({"query": torch.zeros(159, 8, 64)}, "query has 8 heads"),
        ({"query": torch.zeros(159, 9, 32)}, "head_dim 32"),
        ({"seq_lens": torch.zeros(6, dtype=torch.int64)}, "seq_lens of torch.int64"),
        ({"window": 0}, "window 0"),
        ({"kv_scales": torch.ones(2)}, "kv_scales"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], names: str) -> None:
    EXECUTOR.start(1)
    step = build_for_cpu(RAGGED).step
    with pytest.raises(ValueError, match=names):
        cpu_paged_attention(**(step._asdict() | {"scale": SCALE} | change))


def random_tables(rng: np.random.Generator, num_requests: int, num_blocks: int) -> np.ndarray:
    """Block tables of requests of which some begin with the same blocks."""
    tables = np.arange(num_requests * num_blocks, dtype=np.int32).reshape(num_requests, num_blocks)
    for row in range(1, num_requests):
        if rng.random() < 0.7:
            num_shared = int(rng.integers(1, num_blocks))
            tables[row, :num_shared] = tables[rng.integers(0, row), :num_shared]
    return tables


@pytest.mark.parametrize("seed", range(80))
def test_plans_cover_every_query_once_and_fit_their_capacity(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_requests, heads = int(rng.integers(0, 60)), HeadShape(*[(9, 3, 64), (32, 8, 128), (4, 4, 64)][seed % 3])
    query_lens = rng.choice([0, 1, 1, 1, 2, 100, 513] if seed % 2 else [1], num_requests).astype(np.int32)
    seq_lens = (query_lens + rng.integers(0, 5000, num_requests)).astype(np.int32)
    tables = random_tables(rng, num_requests, 5600 // 16) if seed % 4 < 2 else None
    plan = make_plan(query_lens, seq_lens, heads, tables if tables is None else BlockTables(tables, 16))
    seen = np.zeros((num_requests, 600, 60), int)  # by chunk of the keys
    max_queries = max(1, 96 * heads.num_kv_heads // heads.num_query_heads)
    for first, second, first_chunk, last in plan.work.tolist():
        if second >= 0:
            assert last == -1
            num_queries = min(query_lens[first] - second, max_queries)
            seen[first, second : second + num_queries, first_chunk:] += 1
            continue
        assert -second <= max_queries
        requests = plan.reductions[first : first - second, 0].numpy()
        seen[requests, 0, first_chunk : first_chunk + last] += 1
        if second < -1:
            assert ((first_chunk + last) * CHUNK_TOKENS <= seq_lens[requests]).all()
            keys = slice(first_chunk * CHUNK_TOKENS // 16, (first_chunk + last) * CHUNK_TOKENS // 16)
            assert (tables[requests, keys] == tables[requests[0], keys]).all()
    num_partials = 0
    for request, first, partial, _ in plan.reductions.tolist():
        assert (query_lens[request], first, partial) == (1, 0, num_partials)
        num_partials += -(-seq_lens[request] // CHUNK_TOKENS)
    assert num_partials == plan.num_partials
    for request in range(num_requests):
        num_chunks = -(-seq_lens[request] // CHUNK_TOKENS)
        assert (seen[request, : query_lens[request], :num_chunks] == 1).all()
        assert (seen[request, query_lens[request] :] == 0).all()
    capacity = plan_capacity(num_requests, 5600, heads)
    assert len(plan.work) <= capacity.num_work + int(query_lens[query_lens > 1].sum())
    assert len(plan.reductions) <= capacity.num_reductions
    assert plan.num_partials <= capacity.num_partials


def test_keys_in_the_same_blocks_are_read_once(executor: Executor) -> None:
    tables = np.arange(16 * 70, dtype=np.int32).reshape(16, 70)
    tables[:, :64] = tables[0, :64]
    seq_lens = np.full(16, 1100, np.int32)
    plan = make_plan(np.ones(16, np.int32), seq_lens, HeadShape(9, 3, 64), BlockTables(tables, 16))
    shared = plan.work[plan.work[:, 1] == -16]
    assert sorted(chunk for _, _, first, num in shared.tolist() for chunk in range(first, first + num)) == [*range(8)]
    own = plan.work[plan.work[:, 1] == -1]
    assert own[:, 2].tolist() == [8] * 16
    assert len(shared) + len(own) == len(plan.work)


@pytest.mark.parametrize("kind", [*KINDS, {"dtype": torch.bfloat16, "window": 300}], ids=str)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_requests_that_share_blocks_have_the_bits_of_each_alone(
    each_isa, block_size: int, is_int8: bool, kind: dict[str, object]
) -> None:
    """Two groups, of which one has more rows than a tile, one request that shares nothing, and a prompt that does."""
    if is_int8 and "is_fp8" in kind:
        pytest.skip("a cache has one dtype")
    past = [767, 511, 640, 515, 700, 513, 512, 300, 290, 256, 600, 520]
    case = Case([1] * 11 + [40], past, num_kv_heads=3, group=3, head_dim=64, block_size=block_size, **kind)
    built = build_for_cpu(case._replace(window=None), is_int8)  # what one does not see any more, another one does
    options = built.options._replace(window=case.window)
    tables = built.step.block_tables.clone()
    for rows, num_tokens in (([0, 1, 2, 3, 4, 5, 6, 11], 512), ([7, 8, 9], 256)):
        tables[rows, : num_tokens // block_size] = tables[rows[0], : num_tokens // block_size]
    step = built.step._replace(block_tables=tables)
    heads = HeadShape(9, 3, 64)
    query_lens, seq_lens = step.query_start_loc.diff().numpy(), step.seq_lens.numpy()
    plan = make_plan(query_lens, seq_lens, heads, BlockTables(tables.numpy(), block_size))
    assert {-7, -3} <= set(plan.work[:, 1].tolist())
    together = cpu_paged_attention(*step, SCALE, plan=plan, **options._asdict())
    for row in range(12):
        part, tokens = only(step, [row])
        assert_same_bits([attend(part, options)], [together[tokens]])


def test_few_requests_are_split_and_many_are_not(executor: Executor) -> None:
    heads = HeadShape(9, 3, 64)
    one = make_plan(np.ones(1, np.int32), np.array([4000], np.int32), heads)
    assert len(one.work) * 3 >= ITEMS_PER_THREAD * executor.num_threads
    many = make_plan(np.ones(99, np.int32), np.full(99, 300, np.int32), heads)
    assert (len(many.work), len(many.reductions)) == (99, 0)
