"""Requests with a grammar through scheduler and worker: the same in every cell of the matrix, and nobody else minds."""

from __future__ import annotations

import itertools
import json

import grammar_cases
import msgspec
import pytest
from fake_device import FakeGpu
from inline_engine import InlineEngine
from tiny_runner import prompt_of

from octavo.kernels import registry
from octavo.protocol.config import CacheConfig, DeviceKind, ParallelConfig, PreemptionMode, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason
from octavo.protocol.sampling_params import SamplingParams

RAW = grammar_cases.tokenizer()
EOS, START = RAW.token_to_id("</s>"), RAW.token_to_id("<|turn|>")
MAX_TOKENS = 60
MEMORY = {  # tokens on device and host, what a preemption does
    "plenty": (4000, 0, PreemptionMode.RECOMPUTE),
    "swapped": (160, 640, PreemptionMode.SWAP),
    "recomputed": (160, 0, PreemptionMode.RECOMPUTE),
}
MATRIX = list(itertools.product((None, 5), (1, 2), (1, 2), MEMORY))
NAMES = tuple(grammar_cases.SCHEMAS)
PERSON, ENUMS = (grammar_cases.of_schema(grammar_cases.SCHEMAS[name]) for name in ("person", "enums"))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return grammar_cases.model_config(tmp_path_factory.mktemp("model"))


def add(name, seed, fork_of="", **options):
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed, **options})
    return AddRequest(name, prompt_of(12, seed), params, float(seed), fork_of=fork_of)


def ids_of(letters):
    """EOS and a token for each letter, ascending."""
    return tuple(sorted((EOS, *map(RAW.token_to_id, letters))))


PLAIN = [add(f"plain{index}", 20 + index, temperature=index / 2, ignore_eos=True) for index in range(3)]
WITH_GRAMMAR = [
    *(add(name, seed, grammar=grammar_cases.of_schema(grammar_cases.SCHEMAS[name])) for seed, name in enumerate(NAMES)),
    add("greedy", 8, grammar=ENUMS, temperature=0.0, num_logprobs=2),
    add("first", 9, grammar=PERSON),
    *(add(f"choice{index}", 9, "first", grammar=PERSON, choice_index=index) for index in (1, 2, 3)),
    add("late", 10, grammar=ENUMS, grammar_start_token_ids=(START, 7), logit_bias=((START, 4.0),)),
    add("allowed", 11, grammar='start: /[a-z]+/', allowed_token_ids=ids_of("abc")),
    add("penalised", 12, grammar=PERSON, presence_penalty=1.0, bad_words=(tuple(RAW.encode("me").ids),)),
]  # fmt: skip


def run(
    config,
    commands,
    chunk=None,
    num_ranks=1,
    num_in_flight=1,
    memory="plenty",
    observe=lambda engine: None,
    device=None,
):
    num_tokens, num_host_tokens, preemption_mode = MEMORY[memory]
    config = msgspec.structs.replace(
        config,
        cache=CacheConfig(block_size=4, num_device_blocks=num_tokens // 4, num_host_blocks=num_host_tokens // 4),
        scheduler=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_tokens_per_request=chunk,
            max_steps_in_flight=num_in_flight,
            preemption_mode=preemption_mode,
        ),
        parallel=ParallelConfig(device=DeviceKind.CPU, num_threads=1, tensor_parallel_size=num_ranks),
    )
    engine = InlineEngine(config, device)
    ends = engine.run(commands, lambda: observe(engine))
    return {command.request_id: end for command, end in zip(commands, ends, strict=True)}, engine.core.stats()


@pytest.fixture(scope="module")
def plain(config):
    return run(config, [*PLAIN, *WITH_GRAMMAR])[0]


def tokens_of(ends):
    return {name: (end.token_ids, end.finish_reason, end.error) for name, end in ends.items()}


def test_outputs_follow_their_grammars(plain):
    documents = {}
    for name in (*NAMES, "greedy", "first", "choice1", "choice2", "choice3"):
        end = plain[name]
        assert end.error is None
        if end.finish_reason is FinishReason.STOP:
            assert end.token_ids[-1] == EOS
            documents[name] = json.loads(RAW.decode(end.token_ids[:-1]))
    assert len(documents) >= 6, "most come to their end"
    assert documents["enums"].keys() == documents["greedy"].keys() == {"color", "is_big"}
    assert set(RAW.decode(plain["allowed"].token_ids[:-1])) <= set("abc")
    late = plain["late"].token_ids
    start = min(late.index(token_id) for token_id in (START, 7) if token_id in late)
    assert RAW.decode(late[start + 1 :]).startswith('{"color": "')


@pytest.mark.parametrize("cell", MATRIX, ids=lambda cell: "-".join(map(str, cell)))
def test_every_cell_gives_the_same_answers(config, plain, cell):
    ends, stats = run(config, [*PLAIN, *WITH_GRAMMAR], *cell)
    assert tokens_of(ends) == tokens_of(plain)
    assert (stats.num_preemptions > 0) == (cell[-1] != "plenty")
    assert (stats.num_swapped_in_blocks > 0) == (cell[-1] == "swapped")


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_a_preemption_after_each_step_changes_nothing(config, plain, num_in_flight):
    def preempt_the_youngest(engine):
        scheduler = engine.core.scheduler
        if len(scheduler.running) > 1:
            scheduler.preemption.preempt(scheduler.running[-1])

    commands = [command for command in WITH_GRAMMAR if command.request_id in ("enums", "nested", "greedy", "late")]
    ends, stats = run(config, commands, num_in_flight=num_in_flight, observe=preempt_the_youngest)
    assert stats.num_preemptions > 20
    assert tokens_of(ends) == {name: tokens_of(plain)[name] for name in ends}


@pytest.mark.parametrize(("seed", "memory"), [(0, "plenty"), (1, "recomputed"), (2, "swapped")])
def test_a_device_that_does_everything_late_gives_the_same_answers(config, plain, seed, memory):
    """The token before a mask is still under way when the step is given to it."""
    try:
        with FakeGpu(seed) as gpu:
            ends, _ = run(config, [*PLAIN, *WITH_GRAMMAR], num_in_flight=2, memory=memory, device=gpu)
    finally:
        registry.select()
    assert tokens_of(ends) == tokens_of(plain)


def test_a_request_that_is_sent_again_goes_on(config, plain):
    """As after a crash: its output so far comes with it, even into the middle of a key."""
    command = next(command for command in WITH_GRAMMAR if command.request_id == "nested")
    whole, engine = plain["nested"], InlineEngine(config)
    for num_known in range(len(whole.token_ids)):
        again = msgspec.structs.replace(command, output_token_ids=whole.token_ids[:num_known])
        token_ids, finish_reason = run_again(engine, again)
        assert (whole.token_ids[:num_known] + token_ids, finish_reason) == (whole.token_ids, whole.finish_reason)


def run_again(engine, command):
    """What comes, and how it ends."""
    engine.core.add(b"api-0", command)
    outputs = []
    while not outputs or outputs[-1].finish_reason is None or engine.executor.pending:
        engine.core.step()
        engine.core.update(engine.executor.receive())
        outputs += engine.core.take_outputs().get(b"api-0", [])
    return [token_id for output in outputs for token_id in output.token_ids], outputs[-1].finish_reason


def test_a_row_forgets_the_grammar_that_it_had(config, plain):
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_steps_in_flight=1)
    engine = InlineEngine(msgspec.structs.replace(config, scheduler=scheduler))
    ends = engine.run([WITH_GRAMMAR[1], *PLAIN[:1]])
    assert [end.token_ids for end in ends] == [plain["enums"].token_ids, plain["plain0"].token_ids]


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_neighbours_say_what_they_say_without(config, plain, num_in_flight):
    ends, _ = run(config, PLAIN, num_in_flight=num_in_flight)
    assert tokens_of(ends) == {name: tokens_of(plain)[name] for name in ends}


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_who_cannot_go_on_fails_alone_and_it_is_said_why(config, plain, num_in_flight):
    impossible = [
        add("bad", 30, grammar="start: nothing"),
        add("none", 31, grammar='start: "ab"', allowed_token_ids=(EOS,)),
        add("later", 32, grammar='start: "a" "xyz"', allowed_token_ids=ids_of("a")),
    ]
    ends, _ = run(config, [*PLAIN, *impossible, *WITH_GRAMMAR[:2]], num_in_flight=num_in_flight)
    assert {name: ends[name].error for name in ("bad", "none", "later")} == {
        "bad": ErrorCode.GRAMMAR_FAILED,
        "none": ErrorCode.NOTHING_ALLOWED,
        "later": ErrorCode.NOTHING_ALLOWED,
    }
    assert ends["later"].token_ids == RAW.encode("a").ids
    others = [command.request_id for command in (*PLAIN, *WITH_GRAMMAR[:2])]
    assert {name: tokens_of(ends)[name] for name in others} == {name: tokens_of(plain)[name] for name in others}
