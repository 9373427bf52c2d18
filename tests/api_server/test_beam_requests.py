"""Beam search over HTTP: what reaches the engine core, what comes back, and what is refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script
from http_rig import EOS_ID, MODEL, Rig, running, says

from octavo.protocol.config import SchedulerConfig
from octavo.protocol.engine_messages import (
    MAX_NUM_BEAMS,
    AddRequest,
    BeamOutput,
    BeamSearchParams,
    EarlyStopping,
    FinishReason,
)

CHAT, COMPLETIONS = PATHS = ("/v1/chat/completions", "/v1/completions")
SUBJECT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}


def token_ids(text: str) -> list[int]:
    return list(says(text)(None).token_ids)  # type: ignore[arg-type]


def beams(*outputs: BeamOutput) -> Callable[[AddRequest], Script]:
    return lambda request: Script(finish_reason=FinishReason.STOP, beams=outputs, num_cached_tokens=1)


THREE_BEAMS = beams(
    BeamOutput([*token_ids("best"), EOS_ID], -0.1, FinishReason.STOP, EOS_ID),
    BeamOutput([*token_ids("next"), 7], -0.2, FinishReason.STOP, 7),
    BeamOutput(token_ids("longest"), -0.3, FinishReason.LENGTH),
)


async def ask(rig: Rig, path: str, **fields: Any) -> tuple[int, Any]:
    return await rig.post(path, {"model": MODEL, **SUBJECT[path], "use_beam_search": True, **fields})


@pytest.mark.parametrize("path", PATHS)
async def test_each_beam_is_a_choice_best_first(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, THREE_BEAMS) as rig:
        status, answer = await ask(rig, path, n=3, best_of=4, max_tokens=8, stop_token_ids=[7])
        (request,) = rig.engine.added
        generated = await rig.metric("octavo_generation_tokens_total")
        await rig.until(lambda: rig.server.admission.num_live_requests == 0)
    assert status == 200, answer
    choices = answer["choices"]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert texts == ["best", "next", "longest"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "length"]
    assert [choice.get("stop_reason") for choice in choices] == [None, 7, None]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    assert usage["completion_tokens"] == generated == 5 + 5 + 7
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert rig.engine.aborted == []


@pytest.mark.parametrize("path", PATHS)
async def test_the_search_reaches_the_engine_as_one_request(tmp_path: Path, path: str) -> None:
    fields = {
        "n": 3,
        "best_of": 4,
        "length_penalty": 0.5,
        "early_stopping": True,
        "max_tokens": 40,
        "min_tokens": 2,
        "stop_token_ids": [7, 8, 7],
    }
    async with running(tmp_path, THREE_BEAMS) as rig:
        assert (await ask(rig, path, **fields))[0] == 200
        assert (await ask(rig, path, n=3, ignore_eos=True))[0] == 200
        first, second = rig.engine.added
    assert first.beam_search == BeamSearchParams(4, 3, 0.5, EarlyStopping.ALWAYS)
    params = first.sampling_params
    assert (params.temperature, params.max_tokens, params.min_tokens) == (0, 40, 2)
    assert (params.stop_token_ids, params.ignore_eos) == ((7, 8, 7), False)
    assert first.fork_of == ""
    assert second.beam_search == BeamSearchParams(3, 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, EarlyStopping.ALWAYS),
        (False, EarlyStopping.HEURISTIC),
        ("never", EarlyStopping.NEVER),
        (None, EarlyStopping.HEURISTIC),
    ],
)
async def test_early_stopping_has_the_values_of_transformers(
    tmp_path: Path, value: Any, expected: EarlyStopping
) -> None:
    async with running(tmp_path, THREE_BEAMS) as rig:
        assert (await ask(rig, COMPLETIONS, n=3, early_stopping=value))[0] == 200
        assert rig.engine.added[0].beam_search == BeamSearchParams(3, 3, early_stopping=expected)


async def test_several_prompts_are_several_searches(tmp_path: Path) -> None:
    def script(request: AddRequest) -> Script:
        name = chr(request.prompt_token_ids[0] + 33)
        outputs = [BeamOutput(token_ids(name + str(place)), -place, FinishReason.LENGTH) for place in range(2)]
        return Script(finish_reason=FinishReason.LENGTH, beams=outputs, interval_s=0.02 if name == "a" else 0)

    async with running(tmp_path, script) as rig:
        status, answer = await rig.complete(["a", "b"], use_beam_search=True, n=2, max_tokens=2)
        assert status == 200
        assert [choice["text"] for choice in answer["choices"]] == ["a0", "a1", "b0", "b1"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 2
        assert len(rig.engine.added) == 2


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"stream": True}, "stream", "only at the end"),
    ({"temperature": 0.5}, "temperature", "absent or 0 or 1"),
    ({"temperature": 2}, "temperature", "absent or 0 or 1"),
    ({"top_p": 0.9}, "top_p", "does not sample"),
    ({"top_k": 5}, "top_k", "does not sample"),
    ({"min_p": 0.1}, "min_p", "does not sample"),
    ({"stop": ["x"]}, "stop", "stop_token_ids"),
    ({"stop": "x"}, "stop", "stop_token_ids"),
    ({"n": 3, "best_of": 2}, "best_of", "at least n"),
    ({"best_of": 0}, "best_of", "at least n"),
    ({"n": 5}, "n", "at most 4"),
    ({"best_of": 5}, "best_of", "at most 4"),
    ({"length_penalty": 11}, "length_penalty", "10"),
    ({"length_penalty": -11}, "length_penalty", "10"),
    ({"early_stopping": "always"}, "early_stopping", "early_stopping"),
    ({"min_tokens": 17}, "min_tokens", "max_tokens"),
    ({"n": 0}, "n", ">= 1"),
]


@pytest.mark.parametrize("path", PATHS)
async def test_what_does_not_go_with_beams_is_refused_by_name(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, THREE_BEAMS) as rig:  # max_num_seqs is 4
        for fields, param, text in REFUSED:
            status, answer = await ask(rig, path, max_tokens=16, **fields)
            assert status == 400, (fields, answer)
            assert answer["error"]["param"] == param, (fields, answer)
            assert text in answer["error"]["message"], (fields, answer)
        assert rig.engine.added == []
        assert rig.server.admission.num_live_requests == 0


async def test_the_width_has_a_limit_of_its_own_and_counts_against_the_choices(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(max_num_seqs=500)
    async with running(tmp_path, THREE_BEAMS, scheduler=scheduler, max_choices=100) as rig:
        status, answer = await ask(rig, COMPLETIONS, best_of=MAX_NUM_BEAMS + 1)
        assert (status, answer["error"]["param"]) == (400, "best_of")
        status, answer = await rig.complete(["a", "b"], use_beam_search=True, best_of=51)
        assert (status, answer["error"]["param"]) == (400, "best_of")
        assert "102" in answer["error"]["message"]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1}, {"top_k": -1, "top_p": 1}, {"stop": []}])
async def test_values_that_change_nothing_pass(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with running(tmp_path, THREE_BEAMS) as rig:
        assert (await ask(rig, COMPLETIONS, n=3, **fields))[0] == 200
        assert rig.engine.added[0].sampling_params.temperature == 0


@pytest.mark.parametrize("n", [2, 4])
async def test_a_wrong_number_of_beams_is_an_error_not_a_short_answer(tmp_path: Path, n: int) -> None:
    async with running(tmp_path, THREE_BEAMS, request_timeout_s=5) as rig:
        status, answer = await ask(rig, COMPLETIONS, n=n)
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert rig.server.admission.num_live_requests == 0


async def test_a_search_counts_its_prompt_until_its_end(tmp_path: Path) -> None:
    def script(request: AddRequest) -> Script:
        return dataclasses.replace(THREE_BEAMS(request), interval_s=0.1)

    async with running(tmp_path, script, max_queued_tokens=5) as rig:
        first = asyncio.create_task(ask(rig, COMPLETIONS, n=3))
        await rig.until(lambda: rig.server.admission.num_queued_tokens == 2)
        status, answer = await rig.complete("four", max_tokens=1)
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert (await first)[0] == 200
        assert rig.server.admission.num_queued_tokens == 0
