"""What clients say and see of memory: cached tokens, shared prompts, salts, priorities, a bounded queue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_engine import NUM_BLOCKS, Script
from http_rig import MODEL, Rig, make_config, running, says, silent

from octavo.protocol.config import SchedulerConfig, SchedulingPolicy
from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason

CHAT, COMPLETIONS = PATHS = ("/v1/chat/completions", "/v1/completions")


def cached(request: AddRequest) -> Script:
    """Choice i found 10 + i prompt tokens at first and something else when it came back."""
    found = 10 + request.sampling_params.choice_index
    return Script([40] * 4, num_cached_tokens=found, num_cached_tokens_later=99, interval_s=0.002)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_cached_tokens_are_those_of_the_first_output_and_a_prompt_counts_once(
    tmp_path: Path, path: str, n: int, is_streamed: bool
) -> None:
    async with running(tmp_path, cached) as rig:
        if is_streamed:
            events = await rig.stream(path, max_tokens=4, n=n, stream_options={"include_usage": True})
            usage = events[-2]["usage"]
        else:
            _, answer = await (rig.chat if path == CHAT else rig.complete)(max_tokens=4, n=n)
            usage = answer["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}
    assert usage["completion_tokens"] == 4 * n


async def test_cached_tokens_of_several_prompts_add_up(tmp_path: Path) -> None:
    async with running(tmp_path, cached) as rig:
        _, answer = await rig.complete(["abc", "def"], max_tokens=4, n=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 20}


async def test_a_stop_string_does_not_lose_the_cached_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, says("one two three", num_cached_tokens=16, interval_s=0.001)) as rig:
        _, answer = await rig.complete(max_tokens=13, stop=" two")
    assert answer["choices"][0]["text"] == "one"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_every_choice_but_the_first_is_a_fork_of_the_first_of_its_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, says("ab")) as rig:
        await rig.complete(["x", "y"], n=3, max_tokens=2)
        added = rig.engine.added
    assert [request.sampling_params.choice_index for request in added] == [0, 1, 2, 0, 1, 2]
    assert len({request.request_id for request in added}) == 6
    first, second = added[0].request_id, added[3].request_id
    assert [request.fork_of for request in added] == ["", first, first, "", second, second]
    assert [request.prompt_token_ids for request in added[:3]] == [added[0].prompt_token_ids] * 3


@pytest.mark.parametrize("path", PATHS)
async def test_priority_reaches_the_engine_under_its_policy_only(tmp_path: Path, path: str) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, scheduling_policy=SchedulingPolicy.PRIORITY)
    async with running(tmp_path, says("ab"), scheduler=scheduler) as rig:
        ask = rig.chat if path == CHAT else rig.complete
        for priority in (None, 0, -(2**31), 2**31 - 1):
            assert (await ask(max_tokens=2, priority=priority, n=2))[0] == 200
        status, answer = await ask(max_tokens=2, priority=2**31)
        assert (status, answer["error"]["param"]) == (400, "priority")
        priorities = [request.priority for request in rig.engine.added]
    assert priorities == [0, 0, 0, 0, -(2**31), -(2**31), 2**31 - 1, 2**31 - 1]


@pytest.mark.parametrize("path", PATHS)
async def test_the_salt_reaches_the_engine(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, says("ab")) as rig:
        ask = rig.chat if path == CHAT else rig.complete
        for salt in (None, "", "a salt"):
            assert (await ask(max_tokens=2, cache_salt=salt))[0] == 200
        assert [request.cache_salt for request in rig.engine.added] == ["", "", "a salt"]


async def refused(rig: Rig, **fields: Any) -> dict[str, str]:
    body = {"model": MODEL, "prompt": "four", "max_tokens": 1, **fields}
    async with rig.session.post(COMPLETIONS, json=body) as response:
        assert response.status == 429
        assert (await response.json())["error"]["code"] == "overloaded"
        return dict(response.headers)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_too_many_waiting_tokens_are_refused_until_there_is_output(tmp_path: Path, is_streamed: bool) -> None:
    def script(request: AddRequest) -> Script:
        return silent(request) if len(request.prompt_token_ids) == 8 else says("x")(request)

    async with running(tmp_path, script, max_queued_tokens=10) as rig:
        waiting = asyncio.create_task(rig.complete("12345678", n=2, stream=False))
        await rig.until(lambda: len(rig.engine.added) == 2)
        assert rig.server.admission.num_queued_tokens == 8  # the prompt counts once
        assert int((await refused(rig, stream=is_streamed))["Retry-After"]) >= 1
        assert (await rig.complete("12", max_tokens=1))[0] == 200
        assert rig.server.admission.num_queued_tokens == 8
        waiting.cancel()
        await rig.until(lambda: rig.server.admission.num_queued_tokens == 0)
        assert (await rig.complete("four", max_tokens=1))[0] == 200
        assert len(rig.engine.added) == 4


async def test_each_prompt_of_a_request_waits_for_its_own_output(tmp_path: Path) -> None:
    def script(request: AddRequest) -> Script:
        return says("x")(request) if len(request.prompt_token_ids) == 4 else silent(request)

    async with running(tmp_path, script) as rig:
        asking = asyncio.create_task(rig.complete(["four", "22"], n=2, max_tokens=1))
        await rig.until(lambda: sum(rig.server.metrics.finished.values()) == 2)
        assert rig.server.admission.num_queued_tokens == 2
        asking.cancel()
        await rig.until(lambda: rig.server.admission.num_queued_tokens == 0)


async def test_a_long_prompt_alone_is_taken_and_keeps_others_out_only_while_it_waits(tmp_path: Path) -> None:
    def script(request: AddRequest) -> Script:
        is_long = len(request.prompt_token_ids) > 10
        return Script([40] * 200, interval_s=0.02) if is_long else says("x")(request)

    async with running(tmp_path, script, max_queued_tokens=10) as rig:
        body = {"model": MODEL, "prompt": "p" * 50, "max_tokens": 200, "stream": True}
        async with rig.session.post(COMPLETIONS, json=body) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            assert rig.server.admission.num_queued_tokens == 0
            assert (await rig.complete("12345", max_tokens=1))[0] == 200
        await rig.until(lambda: rig.server.admission.num_live_requests == 0)


@pytest.mark.parametrize("kind", ["error", "deadline", "refused", "bad gap"])
async def test_waiting_tokens_are_given_back_however_a_request_ends(tmp_path: Path, kind: str) -> None:
    scripts = {
        "error": says("", finish_reason=FinishReason.ERROR, error=ErrorCode.NEVER_FITS, error_message="9 blocks"),
        "deadline": silent,
        "refused": says("x"),
        "bad gap": says("abc", gap_at=0),
    }
    async with running(tmp_path, scripts[kind], max_queued_tokens=100, request_timeout_s=0.1) as rig:
        fields = {"max_tokens": 3, **({"max_tokens": 10**6} if kind == "refused" else {})}
        status, _ = await rig.complete(["one", "two"], **fields)
        assert status in (400, 500, 504)
        assert rig.server.admission.num_queued_tokens == 0
        assert rig.server.admission.num_live_requests == 0


async def test_the_default_bound_is_four_times_the_kv_memory(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        assert rig.server.admission.max_queued_tokens == 4 * NUM_BLOCKS * 16
    config = make_config(tmp_path, max_queued_tokens=7)
    async with running(tmp_path, says("x"), config=config) as rig:
        assert rig.server.admission.max_queued_tokens == 7
