"""The whole matrix on a tiny model: chunks, caching, blocks, ranks and what memory does change no request's answer.

Tokens are the same in every cell; logprobs have the same bits where as many ranks add.
"""

from __future__ import annotations

import itertools

import logprob_checks
import msgspec
import pytest
import tiny_llama
from inline_engine import InlineEngine
from tiny_runner import prompt_of

from octavo.protocol.config import CacheConfig, DeviceKind, ParallelConfig, PreemptionMode, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams
from octavo.protocol.sampling_params import SamplingParams

MAX_TOKENS = 12
MEMORY = {  # tokens on device and host, what a preemption does
    "plenty": (2000, 0, PreemptionMode.RECOMPUTE),
    "swapped": (96, 480, PreemptionMode.SWAP),
    "recomputed": (96, 0, PreemptionMode.RECOMPUTE),
}
MATRIX = list(itertools.product((None, 5), (True, False), (1, 4), (1, 2), MEMORY))
PLAIN = (None, False, 16, "plenty")
EDITS = (
    {"temperature": 0.0, "repetition_penalty": 1.7, "num_logprobs": 3, "num_prompt_logprobs": 2},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 1.5, "frequency_penalty": 0.9, "num_logprobs": 0},
    {"temperature": 0.8, "seed": 9, "allowed_token_ids": tuple(range(0, 160, 3)), "num_prompt_logprobs": 0},
    {"temperature": 0.0, "logit_bias": ((7, 9.0), (8, 9.0)), "bad_words": ((7, 8), (8, 8, 7), (9,))},
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama.save(tiny_llama.build(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def commands():
    """Greedy and random requests, three with one beginning, some that edit logits, a second choice, and a search."""
    prompts = [prompt_of(20, 9) + prompt_of(3 + index, index) for index in range(3)] + [
        prompt_of(2, 7),
        prompt_of(33, 8),
    ]
    options = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "top_p": 0.8, "seed": 6}]
    commands = [
        AddRequest(
            f"r{index}",
            prompt,
            SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **options[index % 3]),
            float(index),
        )
        for index, prompt in enumerate(prompts)
    ]
    commands += [
        AddRequest(
            f"e{index}",
            prompts[index] if index else prompts[0] + prompts[1],
            SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **options),
            float(index),
        )
        for index, options in enumerate(EDITS)
    ]
    choice = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=1.0, seed=5, choice_index=1)
    search = SamplingParams(max_tokens=6, temperature=0.0)
    return [
        *commands,
        AddRequest("choice", prompts[1], choice, 1.5, fork_of="r1"),
        AddRequest("beams", prompts[3], search, 3.5, beam_search=BeamSearchParams(2, 2)),
    ]


def run(directory, commands, chunk, caches_prefixes, block_size, num_ranks, memory):
    num_tokens, num_host_tokens, preemption_mode = MEMORY[memory]
    config = msgspec.structs.replace(
        tiny_llama.engine_config(directory, max_model_len=64),
        cache=CacheConfig(
            block_size=block_size,
            num_device_blocks=num_tokens // block_size,
            num_host_blocks=num_host_tokens // block_size,
            enable_prefix_caching=caches_prefixes,
            check_swapped_blocks=True,
        ),
        scheduler=SchedulerConfig(max_num_seqs=9, max_tokens_per_request=chunk, preemption_mode=preemption_mode),
        parallel=ParallelConfig(device=DeviceKind.CPU, num_threads=1, tensor_parallel_size=num_ranks),
    )
    engine = InlineEngine(config)
    ends = engine.run(commands)
    tokens = [(end.token_ids, [beam.token_ids for beam in end.beams or []]) for end in ends]
    return tokens, ends, engine.core.stats()


def logprobs_of(ends):
    return [logprob_checks.rows_of(end) for end in ends]


@pytest.fixture(scope="module")
def plain(directory, commands):
    """By number of ranks: with plenty of everything."""
    chunk, caches_prefixes, block_size, memory = PLAIN
    return {n: run(directory, commands, chunk, caches_prefixes, block_size, n, memory)[:2] for n in (1, 2)}


def test_two_ranks_say_what_one_says(plain):
    (tokens, ends), (tokens_of_two, ends_of_two) = plain[1], plain[2]
    assert tokens == tokens_of_two
    logprob_checks.check_close(ends, ends_of_two)


@pytest.mark.parametrize("cell", MATRIX, ids=lambda cell: "-".join(map(str, cell)))
def test_every_cell_gives_the_same_answers(directory, commands, plain, cell):
    tokens, ends, stats = run(directory, commands, *cell)
    assert tokens == plain[cell[3]][0]
    assert logprobs_of(ends) == logprobs_of(plain[cell[3]][1])
    assert len({str(output) for output in tokens}) == len(commands), "every answer is its own"
    assert (stats.num_preemptions > 0) == (cell[-1] != "plenty")
    assert (stats.num_swapped_in_blocks > 0) == (cell[-1] == "swapped")
