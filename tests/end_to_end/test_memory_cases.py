"""What sharing and scarcity of KV memory must not change, through the real processes with the oracle as worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import expected_output
from oracle_beams import expected_beams
from oracle_client import (
    EOS_TOKEN_IDS,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    OracleClient,
    expected_beam_choices,
    expected_choice,
)
from server_process import ORACLE_ARGUMENTS, ServerProcess

from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import BeamSearchParams, EarlyStopping
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model

LIMITS = (*ORACLE_ARGUMENTS, "--max-model-len", str(MAX_MODEL_LEN))
ROOMY = (*LIMITS, "--block-size", "16", "--max-num-seqs", "64")
TIGHT = (*LIMITS, "--block-size", "4", "--num-device-blocks", "160", "--max-num-seqs", "24")  # for about 3 requests
TIERS = {
    "recompute": ("--preemption-mode", "recompute"),
    "swap": ("--preemption-mode", "swap", "--num-host-blocks", "400", "--check-swapped-blocks"),
    "full host": ("--preemption-mode", "swap", "--num-host-blocks", "30"),
    "one step": ("--preemption-mode", "auto", "--num-host-blocks", "100", "--max-steps-in-flight", "1"),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_directory: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(str(smollm2_directory))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(MODEL, *ROOMY) as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[OracleClient]:
    async with OracleClient(server.url) as client:
        yield client
        await client.until_quiet()


def prompt_of(name: str, length: int) -> list[int]:
    """Return a prompt that has no beginning in common with one of another name."""
    source = random.Random(name)
    return [source.randrange(3, 49152) for _ in range(length)]


async def test_an_answer_has_all_its_choices_when_some_end_in_the_same_step(
    client: OracleClient, tokenizer: Tokenizer
) -> None:
    """n choices with indices 0 to n-1, each with its own ending, and usage is their sum."""
    limit = asyncio.Semaphore(16)

    async def ask(number: int) -> None:
        prompt, max_tokens = prompt_of(f"many {number % 7}", 20 + number % 5), 1 + number % 8
        fields = {"n": 8, "temperature": 1, "max_tokens": max_tokens, "seed": number}
        async with limit:
            answer = await (client.streamed if number % 5 == 4 else client.whole)(prompt, **fields)
        expected = [
            expected_choice(tokenizer, prompt, SamplingParams(max_tokens, seed=number, choice_index=index))
            for index in range(8)
        ]
        assert answer.choices == tuple(choice for choice, _ in expected)
        assert answer.num_output_tokens == sum(num_tokens for _, num_tokens in expected)
        assert answer.num_prompt_tokens == len(prompt)

    await asyncio.gather(*map(ask, range(50)))


async def test_greedy_neighbours_do_not_change_seeded_requests(client: OracleClient, tokenizer: Tokenizer) -> None:
    """Sampling parameters are a row's own: seeded answers are the same alone and among greedy requests."""
    seeded = [{"prompt": prompt_of(f"story {i}", 30), "max_tokens": 60, "seed": i, "n": 2} for i in range(4)]
    greedy = [{"prompt": prompt_of(f"story {i % 4}", 30), "max_tokens": 60, "temperature": 0} for i in range(20)]
    alone = [await client.whole(**fields) for fields in seeded]
    together = await asyncio.gather(*(client.whole(**fields) for fields in [*seeded, *greedy]))
    assert [answer.choices for answer in together[:4]] == [answer.choices for answer in alone]
    for number, answer in enumerate(alone):
        params = [SamplingParams(60, seed=number, choice_index=index) for index in range(2)]
        expected = [expected_choice(tokenizer, prompt_of(f"story {number}", 30), each)[0] for each in params]
        assert answer.choices == tuple(expected)


async def test_requests_of_one_client_chosen_id_do_not_touch_each_other(
    client: OracleClient, tokenizer: Tokenizer
) -> None:
    """An id is an echo: a hundred live requests may have the same one; a bad one is replaced."""

    async def ask(number: int) -> None:
        prompt = prompt_of(f"id {number}", 10)
        status, answer, echoed = await client.post(
            prompt, {"X-Request-Id": "same"}, temperature=0, max_tokens=20, request_id="same"
        )
        assert (status, echoed) == (200, "same")
        choice, num_tokens = expected_choice(tokenizer, prompt, SamplingParams(20, temperature=0))
        assert answer["choices"][0]["text"] == choice.text
        assert answer["usage"]["completion_tokens"] == num_tokens

    await asyncio.gather(*map(ask, range(100)))
    for bad in ("x" * 7_000, "héllo", "host:80", "a b"):
        status, _, echoed = await client.post(prompt_of("bad id", 4), {"X-Request-Id": bad}, max_tokens=1)
        assert status == 200
        assert len(echoed) == 32


@pytest.mark.parametrize("tier", TIERS)
async def test_preempted_requests_come_back_whole(tier: str, tokenizer: Tokenizer) -> None:
    """The same text, all tokens, no gap or repeat in streams, and the same usage as one at a time."""
    jobs = [(prompt_of(f"long {number % 15}", 5 + number), 200) for number in range(20)]
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    with ServerProcess(MODEL, *TIGHT, *TIERS[tier]) as tight:
        async with OracleClient(tight.url) as client:
            answers = await asyncio.gather(
                *(
                    (client.streamed if number % 2 else client.whole)(prompt, max_tokens=max_tokens, **fields)
                    for number, (prompt, max_tokens) in enumerate(jobs)
                )
            )
            for (prompt, max_tokens), answer in zip(jobs, answers, strict=True):
                params = SamplingParams(max_tokens, temperature=0, ignore_eos=True)
                assert answer.choices == (expected_choice(tokenizer, prompt, params)[0],)
                assert (answer.num_prompt_tokens, answer.num_output_tokens) == (len(prompt), 200)
            assert await client.metric("octavo_preemptions_total") > 0, "the pool was too large to prove anything"
            if tier in ("swap", "full host"):
                assert await client.metric("octavo_swapped_in_blocks_total") > 0
            if tier in ("recompute", "full host"):
                assert await client.metric("octavo_recomputed_tokens_total") > 0
            if tier == "recompute":
                assert await client.metric("octavo_swapped_out_blocks_total") == 0
            await client.until_quiet()


@pytest.mark.parametrize("has_cache", [True, False])
async def test_the_first_answer_of_a_fresh_server_is_like_all_later_ones(tokenizer: Tokenizer, has_cache: bool) -> None:
    """A cache hit changes nothing but cached_tokens: whole blocks of the prompt, and always less than the prompt."""
    block_size = 16
    flags = () if has_cache else ("--no-enable-prefix-caching",)
    params = SamplingParams(20, temperature=0)
    with ServerProcess(MODEL, *ROOMY, *flags) as fresh:
        async with OracleClient(fresh.url) as client:
            status, answer, _ = await client.post([], temperature=0)
            assert (status, answer["error"]["param"]) == (400, "prompt")
            for length in (1, block_size - 1, block_size, block_size + 1, 3 * block_size):
                prompt = prompt_of(f"length {length}", length)
                answers = [await client.whole(prompt, max_tokens=20, temperature=0) for _ in range(5)]
                assert {answer.choices for answer in answers} == {(expected_choice(tokenizer, prompt, params)[0],)}
                num_cached = (length - 1) // block_size * block_size if has_cache else 0
                assert [answer.num_cached_tokens for answer in answers] == [0] + [num_cached] * 4
                fork = [*prompt[: length - length // 3], *prompt_of("fork", 20)]
                answer = await client.whole(fork, max_tokens=20, temperature=0)
                assert answer.choices == (expected_choice(tokenizer, fork, params)[0],)
                num_shared = (length - length // 3) // block_size * block_size if has_cache else 0
                assert answer.num_cached_tokens == num_shared
            hits = await client.metric("octavo_prefix_cache_hits_total")
            assert (hits > 0) is has_cache
            assert hits < await client.metric("octavo_prefix_cache_queries_total")


async def test_equal_tokens_after_another_beginning_are_not_a_hit(client: OracleClient, tokenizer: Tokenizer) -> None:
    """A block's KV depends on all that comes before it, so equal tokens alone are no reason to share it."""
    one, other, common, tail = (prompt_of(name, 16) for name in ("one", "other", "common", "tail"))
    params = SamplingParams(10, temperature=0)
    for prompt, num_cached in (
        ([*one, *common, *tail], 0),
        ([*other, *tail], 0),
        ([*other, *common, *tail], 16),
        ([*common, *tail], 0),
        ([*one, *common, *tail], 32),
    ):
        answer = await client.whole(prompt, max_tokens=10, temperature=0)
        assert (answer.choices, answer.num_cached_tokens) == (
            (expected_choice(tokenizer, prompt, params)[0],),
            num_cached,
        )


async def test_generated_tokens_are_found_in_the_cache_too(client: OracleClient, tokenizer: Tokenizer) -> None:
    """The next turn of a conversation computes only what is new: the first turn's answer was computed already."""
    prompt, params = prompt_of("turn", 40), SamplingParams(60, temperature=0, ignore_eos=True)
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    first = await client.whole(prompt, **fields)
    assert (first.num_cached_tokens, first.num_output_tokens) == (0, 60)
    output, _ = expected_output(prompt, params, VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN)
    next_prompt = [*prompt, *output, *prompt_of("next turn", 5)]
    second = await client.streamed(next_prompt, **fields)
    assert second.choices == (expected_choice(tokenizer, next_prompt, params)[0],)
    assert second.num_cached_tokens == 99 // 16 * 16  # the last token that was generated was never computed


SEARCHES: list[tuple[dict[str, Any], BeamSearchParams, dict[str, Any]]] = [
    ({"n": 3}, BeamSearchParams(3, 3), {}),
    ({"n": 2, "best_of": 4, "early_stopping": True}, BeamSearchParams(4, 2, 1.0, EarlyStopping.ALWAYS), {}),
    (
        {"n": 6, "length_penalty": 0.0, "early_stopping": "never", "min_tokens": 9},
        BeamSearchParams(6, 6, 0.0, EarlyStopping.NEVER),
        {"min_tokens": 9},
    ),
    ({"n": 3, "length_penalty": 2, "ignore_eos": True}, BeamSearchParams(3, 3, 2.0), {"ignore_eos": True}),
    ({"n": 1, "best_of": 2}, BeamSearchParams(2, 1), {}),
]


@pytest.mark.parametrize("tier", ["roomy", "swap", "recompute"])
async def test_beams_end_at_their_stop_tokens_and_come_best_first(tier: str, tokenizer: Tokenizer) -> None:
    """n distinct beams by score, each ended by EOS or a stop token or its length, among others that are preempted."""
    flags = ROOMY if tier == "roomy" else (*TIGHT, *TIERS[tier])
    jobs = [(prompt_of(f"beams {number}", 30 + number), *search) for number, search in enumerate(SEARCHES * 3)]
    with ServerProcess(MODEL, *flags) as server:
        async with OracleClient(server.url) as client:
            others = [
                asyncio.create_task(
                    client.whole(prompt_of(f"other {i}", 20), max_tokens=150, temperature=0, ignore_eos=True)
                )
                for i in range(8)
            ]
            answers = await asyncio.gather(
                *(
                    client.whole(prompt, use_beam_search=True, max_tokens=40, temperature=0, **fields)
                    for prompt, fields, _, _ in jobs
                )
            )
            await asyncio.gather(*others)
            num_stopped = 0
            for (prompt, _, search, options), answer in zip(jobs, answers, strict=True):
                num_candidates = 2 * search.num_beams
                params = SamplingParams(40, temperature=0, num_candidates=num_candidates, **options)
                choices, num_tokens = expected_beam_choices(tokenizer, prompt, params, search)
                assert answer.choices == choices
                assert answer.num_output_tokens == num_tokens
                assert len(set(answer.choices)) == search.num_choices
                num_stopped += sum(choice.finish_reason == "stop" for choice in answer.choices)
            assert num_stopped > 0
            if tier != "roomy":
                assert await client.metric("octavo_preemptions_total") > 0, "the pool was too large to prove anything"
            await client.until_quiet()


async def test_a_stop_token_ends_a_beam_and_is_not_part_of_its_text(client: OracleClient, tokenizer: Tokenizer) -> None:
    prompt = prompt_of("stop", 25)
    search = BeamSearchParams(3, 3)
    free = SamplingParams(30, temperature=0, num_candidates=6, ignore_eos=True)
    stop_ids = _second_tokens(prompt, free, search)
    params = SamplingParams(
        30, temperature=0, ignore_eos=True, stop_token_ids=stop_ids, num_candidates=3 * (1 + len(stop_ids))
    )
    answer = await client.whole(
        prompt, use_beam_search=True, n=3, max_tokens=30, ignore_eos=True, stop_token_ids=[*stop_ids]
    )
    choices, num_tokens = expected_beam_choices(tokenizer, prompt, params, search)
    assert answer.choices == choices
    assert answer.num_output_tokens == num_tokens
    assert any(choice.stop_reason in stop_ids for choice in choices)


def _second_tokens(prompt: list[int], params: SamplingParams, search: BeamSearchParams) -> tuple[int, ...]:
    """Return the second tokens of the beams that come out without them, so that they do end beams."""
    outputs = expected_beams(prompt, params, search, VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN)
    return tuple(dict.fromkeys(output[1] for output, _ in outputs))


async def test_what_beams_cannot_do_is_refused_by_name(client: OracleClient) -> None:
    """A stop string and a stream are refused, not silently ignored."""
    for fields, param in (({"stop": ["<S>"]}, "stop"), ({"stream": True}, "stream"), ({"n": 65}, "n")):
        status, answer, _ = await client.post(
            [1, 2], **{"use_beam_search": True, "n": 3, "max_tokens": 40, "temperature": 0, **fields}
        )
        assert (status, answer["error"]["param"]) == (400, param)


async def test_keys_share_no_blocks_and_salts_split_a_key_s_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A prompt that one key has sent is new to every other key and to every other salt."""
    key_file = tmp_path / "keys.toml"
    key_file.write_text("".join(f'[[key]]\nname = "{name}"\nkey = "sk-{name}"\n' for name in "ab"))
    key_file.chmod(0o600)
    prompt = prompt_of("secret", 50)
    with ServerProcess(MODEL, *ROOMY, "--api-key-file", str(key_file)) as server:
        async with (
            OracleClient(server.url, Authorization="Bearer sk-a") as a,
            OracleClient(server.url, Authorization="Bearer sk-b") as b,
            OracleClient(server.url) as nobody,
        ):
            expected = (expected_choice(tokenizer, prompt, SamplingParams(10, temperature=0))[0],)
            for client, salt, num_cached in (
                (a, None, 0),
                (b, None, 0),
                (a, "x", 0),
                (b, "x", 0),
                (a, None, 48),
                (b, None, 48),
                (a, "x", 48),
                (b, "1:a:x", 0),
            ):
                answer = await client.whole(prompt, max_tokens=10, temperature=0, cache_salt=salt)
                assert (answer.choices, answer.num_cached_tokens) == (expected, num_cached)
            status, answer, _ = await nobody.post(prompt, max_tokens=1)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert "sk-a" not in server.stderr


async def test_a_more_urgent_request_goes_first() -> None:
    """With the policy `priority` and one place, the waiting request of the lowest number is next."""
    finished: list[int] = []
    with ServerProcess(MODEL, *LIMITS, "--max-num-seqs", "1", "--scheduling-policy", "priority") as server:
        async with OracleClient(server.url) as client:

            async def ask(priority: int) -> None:
                await client.whole(prompt_of(f"priority {priority}", 8), max_tokens=50, priority=priority)
                finished.append(priority)

            worker = server.process_called("oracle_worker")
            worker.suspend()  # so that all are there before the first one ends
            asking = []
            for num_waiting, priority in enumerate((9, 5, 0, 7, -3)):
                asking.append(asyncio.create_task(ask(priority)))
                await client.until("octavo_running_requests", 1)
                await client.until("octavo_waiting_requests", num_waiting)
            worker.resume()
            await asyncio.gather(*asking)
    assert finished == [9, -3, 0, 5, 7]
