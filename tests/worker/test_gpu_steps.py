"""Steps on a GPU whose operations run late and in a hostile order give the CPU's tokens, and no launch waits."""

from __future__ import annotations

import random
from collections.abc import Callable

import logprob_checks
import msgspec
import pytest
import tiny_llama
import torch
from fake_device import FakeGpu
from inline_engine import InlineEngine
from step_driver import StepDriver
from tiny_runner import NUM_OUTPUT, PROMPTS, prompt_of, step_of

from octavo.kernels import registry
from octavo.protocol.config import CacheConfig, ParallelConfig, PreemptionMode, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams, ErrorCode, RequestOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NO_TOKEN, NewRequest
from octavo.worker.graph import StepGraph
from octavo.worker.model_runner import ModelRunner

BLOCK_SIZE = 4
EDITS = (
    {},
    {"repetition_penalty": 1.6, "presence_penalty": 0.5, "num_logprobs": 2},
    {"frequency_penalty": 1.5, "allowed_token_ids": tuple(range(70, 100)), "num_prompt_logprobs": 1},
    {"allowed_token_ids": (81, 82), "bad_words": ((81, 81), (82, 82, 82), (82, 81, 82)), "num_logprobs": 0},
    {"logit_bias": ((90, 3.0), (91, -2.0)), "bad_words": ((90, 90),), "num_prompt_logprobs": 0},
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama.save(tiny_llama.build(), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _references():
    """The fake GPU's kernels are for its tests only."""
    yield
    registry.select()


def config_of(directory, num_blocks=60, num_host_blocks=60, steps_in_flight=2, eager=False, **scheduler):
    config = tiny_llama.engine_config(directory)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "max_tokens_per_request": 13, **scheduler}
    return msgspec.structs.replace(
        config,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_device_blocks=num_blocks, num_host_blocks=num_host_blocks),
        scheduler=SchedulerConfig(max_steps_in_flight=steps_in_flight, **limits),
        parallel=ParallelConfig(num_threads=1, enforce_eager=eager),
    )


def watched(runner: ModelRunner, gpu: FakeGpu) -> ModelRunner:
    """Have every launch fail that waits, or that copies more than its step and what new rows keep on the device."""
    launch = runner.launch

    def launch_without_waiting(step, *args):
        num_copies = gpu.num_copies_to_device
        with gpu.no_waiting():
            pending = launch(step, *args)
        asked = [new.sampling_params for new in step.new_requests]
        num_kept = sum(params.has_penalties + bool(params.allowed_token_ids) for params in asked)
        assert gpu.num_copies_to_device - num_copies <= 1 + num_kept
        return pending

    runner.launch = launch_without_waiting
    return runner


def engine_on(gpu: FakeGpu, config) -> InlineEngine:
    """An engine whose KV memory is full of NaN."""
    engine = InlineEngine(config, gpu)
    for cache in engine.executor.runner.copier.caches.values():
        cache.fill_(torch.nan)
    gpu.synchronize()
    watched(engine.executor.runner, gpu)
    return engine


def runner_on(gpu: FakeGpu, directory, **options) -> ModelRunner:
    return engine_on(gpu, config_of(directory, **options)).executor.runner


def random_requests(seed: int) -> list[AddRequest]:
    """Greedy and random ones, some with a common beginning, some that edit logits, forks, and a search."""
    rng = random.Random(seed)
    beginning = prompt_of(21, seed)
    commands = []
    for index in range(9):
        prompt = (beginning if rng.random() < 0.5 else []) + prompt_of(rng.randint(1, 40), 100 * seed + index)
        options = rng.choice(
            [
                {"temperature": 0.0},
                {"temperature": 1.0},
                {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
                {"temperature": 1.2, "min_p": 0.05, "min_tokens": 4, "stop_token_ids": tuple(range(80))},
            ]
        )
        options = options | EDITS[(index + seed) % len(EDITS)]
        params = SamplingParams(max_tokens=rng.randint(12, 30), seed=rng.randrange(2**40), ignore_eos=True, **options)
        commands.append(AddRequest(f"r{index}", prompt, params, float(index)))
    fork = SamplingParams(max_tokens=12, temperature=1.0, seed=3, choice_index=1, ignore_eos=True)
    commands.append(AddRequest("fork", commands[0].prompt_token_ids, fork, 0.5, fork_of="r0"))
    search = SamplingParams(max_tokens=8, temperature=0.0)
    commands.append(AddRequest("beams", prompt_of(9, seed), search, 4.5, beam_search=BeamSearchParams(3, 3)))
    return commands


def tokens_of(ends: list[RequestOutput]) -> list[object]:
    return [(end.token_ids, [beam.token_ids for beam in end.beams or []]) for end in ends]


def check_same(ends: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert tokens_of(ends) == tokens_of(expected)
    logprob_checks.check_close(ends, expected)


@pytest.fixture(scope="module")
def on_cpu(directory):
    """What the CPU says with plenty of memory, one step at a time."""
    known = {}

    def outputs(seed: int) -> list[RequestOutput]:
        if seed not in known:
            registry.select()
            engine = InlineEngine(config_of(directory, num_blocks=400, num_host_blocks=0, steps_in_flight=1))
            known[seed] = engine.run(random_requests(seed))
        return known[seed]

    return outputs


MEMORY = {
    "plenty": {"num_blocks": 400, "num_host_blocks": 0},
    "swaps": {"num_blocks": 26, "num_host_blocks": 200, "preemption_mode": PreemptionMode.SWAP},
    "recomputes": {"num_blocks": 26, "num_host_blocks": 0, "preemption_mode": PreemptionMode.RECOMPUTE},
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    ("steps_in_flight", "eager", "seed"), [(1, True, 0), (2, True, 1), (1, False, 0), (2, False, 1)]
)
def test_any_schedule_gives_the_cpus_tokens(directory, on_cpu, memory, steps_in_flight, eager, seed):
    expected = on_cpu(seed)
    with FakeGpu(seed) as gpu:
        config = config_of(directory, steps_in_flight=steps_in_flight, eager=eager, **MEMORY[memory])
        engine = engine_on(gpu, config)
        check_same(engine.run(random_requests(seed)), expected)
        stats = engine.core.stats()
    assert (stats.num_preemptions > 0) == (memory != "plenty")
    assert (stats.num_swapped_in_blocks > 0) == (memory == "swaps")


def test_the_cpu_may_be_two_steps_ahead_as_well(directory, on_cpu):
    """Its results are read late: the second step takes its tokens from where the first one left them."""
    engine = InlineEngine(config_of(directory, **MEMORY["swaps"]))
    check_same(engine.run(random_requests(1)), on_cpu(1))


def replays_of(runner: ModelRunner) -> list[int]:
    """The sizes of the graphs that will have been replayed."""
    replays = []

    def counted(graph: StepGraph) -> Callable[[], None]:
        replay = graph.graph.replay
        return lambda: (replays.append(graph.shape.size), replay())

    for graph in runner.graphs.graphs:
        graph.graph.replay = counted(graph)
    return replays


@pytest.mark.parametrize("eager", [False, True])
def test_decode_runs_in_graphs_and_copies_once_a_step(directory, alone, eager):
    with FakeGpu(5) as gpu:
        runner = runner_on(gpu, directory, eager=eager, num_blocks=200)
        replays = replays_of(runner)
        driver = StepDriver(runner, uses_steady=True)
        for name in ("r0", "r1", "r2", "r3", "r4"):
            driver.add(name, PROMPTS[name])
        while any(request.num_computed < len(request.prompt) for request in driver.requests.values()):
            driver.step(**{name: min(9, r.num_tokens - r.num_computed) for name, r in driver.requests.items()})
        replays.clear()
        num_copies = gpu.num_copies_to_device
        first = len(driver.requests["r4"].output)
        outputs = driver.run_until(NUM_OUTPUT, chunk=1)
        num_steps = NUM_OUTPUT - first
        assert gpu.num_copies_to_device - num_copies == num_steps
    for name, output in outputs.items():
        assert output[:NUM_OUTPUT] == alone[name]
    assert runner.graphs.sizes == ([] if eager else [1, 2, 4, 8])
    if not eager:
        assert len(replays) == num_steps
        assert replays[0] == 8
        assert set(replays) <= {1, 2, 4, 8}


def test_a_graph_reads_and_writes_for_its_own_requests_only(directory, alone):
    """All blocks that nobody holds, and those of others that pause, are NaN or watched."""
    with FakeGpu(6) as gpu:
        runner = runner_on(gpu, directory, num_blocks=200)
        driver = StepDriver(runner, uses_steady=True)
        for name in ("r1", "r2", "r3"):
            driver.add(name, PROMPTS[name])
            driver.step(**{name: len(PROMPTS[name])}) if len(PROMPTS[name]) < 40 else None
        held = [block for request in driver.requests.values() for block in request.blocks]
        paused = driver.requests["r2"].blocks
        before = runner.kv_cache.cpu()
        for _ in range(3):
            driver.step(r1=1, r3=1)  # of 2 requests; and 3 of them would be padded
        driver.step(r1=1)
        after = runner.kv_cache.cpu()
        others = [block for block in range(200) if block not in set(held) - set(paused)]
        new = [block for name in ("r1", "r3") for block in driver.requests[name].blocks]
        untouched = [block for block in others if block not in new]
        assert torch.equal(before[:, :, untouched].nan_to_num(7.0), after[:, :, untouched].nan_to_num(7.0))
        driver.run_until(NUM_OUTPUT, chunk=1)
    for name in ("r1", "r2", "r3"):
        assert driver.requests[name].output[:NUM_OUTPUT] == alone[name]


def test_a_step_that_needs_more_than_its_graph_has_runs_without(directory, alone, monkeypatch):
    monkeypatch.setattr("fake_kernels.SPARE_WORK", -1)
    with FakeGpu(7) as gpu:
        runner = runner_on(gpu, directory, num_blocks=200)
        replays = replays_of(runner)
        driver = StepDriver(runner)
        for name in ("r0", "r1"):
            driver.add(name, PROMPTS[name])
        outputs = driver.run_until(NUM_OUTPUT, chunk=3)
    assert set(replays) == {1}, "the graph of two has room for the work of one"
    assert {name: outputs[name][:NUM_OUTPUT] for name in outputs} == {name: alone[name] for name in ("r0", "r1")}


def test_a_row_that_fails_with_two_steps_in_flight(directory, alone):
    """Its failure is known when the next step has been launched, which has given its row to nobody."""
    with FakeGpu(8) as gpu:
        runner = runner_on(gpu, directory, num_blocks=200)
        params = SamplingParams(max_tokens=20, temperature=0.0)
        names = ["r0", "r1", "r2"]
        new = [NewRequest(n, PROMPTS[n], [], params, list(range(i * 20, i * 20 + 20)), 0) for i, n in enumerate(names)]
        counts = {name: len(PROMPTS[name]) for name in names}
        runner.execute(step_of(0, new_requests=new, num_scheduled_tokens=counts))
        runner.kv_cache[:, :, 20] = torch.nan
        second = runner.launch(step_of(1, steady_joined=names))
        third = runner.launch(step_of(2))
        assert second.result().errors == {"r1": ErrorCode.NUMERICAL_ERROR}
        newcomer = NewRequest("r4", PROMPTS["r4"], [], params, list(range(60, 80)), 0)
        fourth = runner.launch(
            step_of(3, dropped_request_ids=["r1"], new_requests=[newcomer], num_scheduled_tokens={"r4": 31})
        )
        late, last = third.result(), fourth.result()
        row = runner.states.rows["r0"]
        known = runner.states.token_ids[row, : runner.states.num_tokens[row]].tolist()
    assert known == PROMPTS["r0"] + alone["r0"][:4], "the host has learnt what the device drew"
    assert late.sampled_token_ids == [alone["r0"][2], NO_TOKEN, alone["r2"][2]]
    assert late.errors == {}
    assert last.sampled_token_ids == [alone["r0"][3], alone["r2"][3], alone["r4"][0]]


def test_rows_that_are_left_are_given_away_when_nobody_will_write_to_them(directory, alone):
    """Everybody leaves and as many come, twice, with a step under way each time."""
    with FakeGpu(9) as gpu:
        runner = runner_on(gpu, directory, num_blocks=200, max_num_seqs=2)
        params = SamplingParams(max_tokens=20, temperature=0.0)
        pending, before, sampled = [], [], []
        for number, pair in enumerate((("r0", "r1"), ("r2", "r3"), ("r4", "r0"), ("r1", "r2"))):
            new = [
                NewRequest(name, PROMPTS[name], [], params, list(range(first, first + 12)), 0)
                for name, first in zip(pair, ((number % 2) * 24, (number % 2) * 24 + 12), strict=True)
            ]
            counts = {name: len(PROMPTS[name]) for name in pair}
            dropped = [name for name in before if name not in pair]
            step = step_of(number, dropped_request_ids=dropped, new_requests=new, num_scheduled_tokens=counts)
            pending.append(runner.launch(step))
            if len(pending) == 2:
                sampled.append(pending.pop(0).result().sampled_token_ids)
            before = pair
        sampled.append(pending.pop().result().sampled_token_ids)
        assert len(runner.states.free_rows) + len(runner.states.rows) == runner.states.num_rows == 4
    pairs = (("r0", "r1"), ("r2", "r3"), ("r4", "r0"), ("r1", "r2"))
    assert sampled == [[alone[name][0] for name in pair] for pair in pairs]
