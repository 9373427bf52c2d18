"""Ollama's routes over a fake engine: lines that join to the whole answer, counts, errors, and what lists say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script
from http_rig import MODEL, Rig, running, says, silent
from named_streams import CALL, WEATHER, breaks, ends, parse_as

from octavo.api_server.http import sse
from octavo.protocol.engine_messages import FinishReason

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
SUBJECTS = {"/api/chat": HELLO, "/api/generate": {"prompt": "Hi"}}
ROUTES = pytest.mark.parametrize("path", SUBJECTS)


async def stream(rig: Rig, path: str, **fields: Any) -> list[dict[str, Any]]:
    """POST with Ollama's default, which is to stream; return the lines."""
    async with rig.session.post(path, json={"model": MODEL, **SUBJECTS[path], **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "application/x-ndjson; charset=utf-8"
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def whole(rig: Rig, path: str, **fields: Any) -> dict[str, Any]:
    status, answer = await rig.post(path, {"model": MODEL, "stream": False, **SUBJECTS[path], **fields})
    assert status == 200, answer
    return answer


def text_of(answer: dict[str, Any]) -> str:
    return answer["response"] if "response" in answer else answer["message"]["content"]


@ROUTES
async def test_lines_join_to_the_whole_answer_and_the_last_has_the_counts(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, ends("Grüezi 🌍!")) as rig:
        lines, answer = await stream(rig, path), await whole(rig, path)
    assert "".join(map(text_of, lines)) == text_of(answer) == "Grüezi 🌍!"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for last in (lines[-1], answer):
        assert (last["model"], last["done"], last["done_reason"]) == (MODEL, True, "stop")
        assert last["eval_count"] == len("Grüezi 🌍!".encode()) + 1  # the token that ends it
        assert last["prompt_eval_count"] > 0
        durations = [last[f"{name}_duration"] for name in ("prompt_eval", "eval", "load", "total")]
        assert all(ns >= 0 for ns in durations)
        assert abs(sum(durations[:3]) - durations[3]) <= 2
    assert lines[-1]["prompt_eval_count"] == answer["prompt_eval_count"]
    assert "done_reason" not in lines[0]


async def test_durations_are_those_of_the_engine(tmp_path: Path) -> None:
    async with running(tmp_path, ends("abcdef", interval_s=0.02)) as rig:
        answer = await whole(rig, "/api/chat")
    assert 0.08e9 < answer["eval_duration"] < answer["total_duration"] < 60e9


@ROUTES
async def test_the_end_of_the_room_is_the_reason_length(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, says("Hello", finish_reason=FinishReason.LENGTH)) as rig:
        lines = await stream(rig, path, options={"num_predict": 5})
        answer = await whole(rig, path, options={"num_predict": 5})
    assert (lines[-1]["done_reason"], answer["done_reason"]) == ("length", "length")
    assert rig.engine.added[-1].sampling_params.max_tokens == 5


async def test_thoughts_and_calls_are_fields_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(f"<think>Hm</think>Looking.{CALL}")) as rig:
        lines, answer = await stream(rig, "/api/chat"), await whole(rig, "/api/chat")
    messages = [line["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in messages) == answer["message"]["thinking"] == "Hm"
    assert "".join(message["content"] for message in messages) == answer["message"]["content"] == "Looking."
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for (call,) in (calls, answer["message"]["tool_calls"]):
        assert call["function"] == {"name": "get_weather", "arguments": {"city": "Rome"}}
        assert call["id"].startswith("call_")
    assert (lines[-1]["done_reason"], answer["done_reason"]) == ("stop", "stop")


async def test_a_stop_string_is_not_seen_and_logprobs_are_those_of_the_text(tmp_path: Path) -> None:
    async with running(tmp_path, ends("one two")) as rig:
        lines = await stream(rig, "/api/generate", options={"stop": "tw"})
    assert "".join(map(text_of, lines)) == "one "
    assert all("logprobs" not in line for line in lines)


@ROUTES
async def test_an_error_is_a_text_that_names_the_field(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, ends("Hi")) as rig:
        status, answer = await rig.post(path, {"model": MODEL, **SUBJECTS[path], "options": {"top_p": 2}})
        missing = await rig.post(path, {"model": "other", **SUBJECTS[path]})
        tagged = await whole(rig, path, model=f"{MODEL}:latest")
    assert (status, answer["param"], answer["code"]) == (400, "options.top_p", "invalid_value")
    assert answer["error"].startswith("options.top_p: expected number")
    assert (missing[0], missing[1]["code"]) == (404, "model_not_found")
    assert text_of(tagged) == "Hi"


@ROUTES
async def test_a_stream_that_breaks_ends_with_a_line_that_says_so(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, breaks("Hel")) as rig:
        *lines, last = await stream(rig, path)
    assert "".join(map(text_of, lines)) == "Hel"
    assert last == {
        "error": "the model computed values that are no numbers for this request",
        "param": None,
        "code": "numerical_error",
    }


async def test_silence_sends_nothing_that_a_client_would_have_to_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    async with running(tmp_path, silent) as rig:
        body = {"model": MODEL, **HELLO}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), rig.session.post("/api/chat", json=body):
                pass  # not even the head of an answer


async def test_the_lists_of_models(tmp_path: Path) -> None:
    async with running(tmp_path, lambda request: Script([])) as rig:
        async with rig.session.get("/api/tags") as response:
            models = (await response.json())["models"]
        async with rig.session.get("/api/version") as response:
            version = await response.json()
        shown = await rig.post("/api/show", {"model": MODEL})
        missing = await rig.post("/api/show", {"model": "other"})
    assert [model["name"] for model in models] == [model["model"] for model in models] == [MODEL, "org/alias"]
    assert all(len(model["digest"]) == 64 for model in models)
    assert version.keys() == {"version"}
    assert shown[0] == 200
    assert shown[1]["model_info"] == {"general.context_length": 512}
    assert missing[0] == 404
    assert isinstance(missing[1]["error"], str)
