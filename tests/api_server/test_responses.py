"""POST /v1/responses over real sockets: whole answers, and that streams end with the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_rig import MODEL, Rig, running, says
from named_streams import CALL, WEATHER, breaks, ends, parse_as, stream_named

PATH = "/v1/responses"
SCHEMA_FIELDS = {  # what OpenAI's schema requires
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "usage",
        "max_output_tokens",
    ),
    *("max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
NAMES_OF_ONE = ("id", "call_id", "created_at", "completed_at")


async def respond(rig: Rig, **fields: Any) -> Any:
    status, answer = await rig.post(PATH, {"model": MODEL, "input": "Hi", **fields})
    assert status == 200, answer
    return answer


async def test_the_answer_has_exactly_the_fields_of_the_schema(tmp_path: Path) -> None:
    async with running(tmp_path, ends("Hello!", num_cached_tokens=3)) as rig:
        answer = await respond(rig, metadata={"a": "b"}, prompt_cache_key="k", safety_identifier="s", temperature=0.5)
    assert answer.keys() == SCHEMA_FIELDS
    (message,) = answer["output"]
    assert message.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    assert message == {"type": "message", "status": "completed", "role": "assistant", "content": [text]}
    assert answer["id"].startswith("resp_")
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    assert answer["completed_at"] >= answer["created_at"]
    assert (answer["metadata"], answer["prompt_cache_key"], answer["safety_identifier"]) == ({"a": "b"}, "k", "s")
    assert (answer["store"], answer["temperature"], answer["top_p"]) == (False, 0.5, 1.0)
    num_prompt_tokens = answer["usage"]["input_tokens"]
    assert answer["usage"] == {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + 7,
    }


async def test_a_text_is_the_same_prompt_as_in_a_chat(tmp_path: Path) -> None:
    async with running(tmp_path, ends("x")) as rig:
        await rig.chat("Hi", max_completion_tokens=3)
        await respond(rig, max_output_tokens=3)
        chat, response = rig.engine.added
    assert chat.prompt_token_ids == response.prompt_token_ids
    assert response.sampling_params.max_tokens == 3


async def test_an_answer_that_is_cut_is_incomplete(tmp_path: Path) -> None:
    async with running(tmp_path, says("Hello!")) as rig:
        answer = await respond(rig, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["max_output_tokens"], answer["completed_at"]) == (3, None)
    assert (answer["output"][0]["status"], answer["output"][0]["content"][0]["text"]) == ("incomplete", "Hel")


async def test_an_answer_without_text_has_an_empty_message(tmp_path: Path) -> None:
    async with running(tmp_path, ends("")) as rig:
        answer = await respond(rig)
    assert [part["text"] for part in answer["output"][0]["content"]] == [""]


async def test_thoughts_and_calls_are_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(f"<think>Rome.</think>Looking.{CALL}{CALL}")) as rig:
        answer = await respond(rig)
    reasoning, message, *calls = answer["output"]
    assert (reasoning["summary"], reasoning["content"]) == ([], [{"type": "reasoning_text", "text": "Rome."}])
    assert message["content"][0]["text"] == "Looking."
    assert [(call["type"], call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("function_call", "get_weather", '{"city": "Rome"}', "completed")
    ] * 2
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    assert answer["status"] == "completed"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_logprobs_are_in_the_text(tmp_path: Path) -> None:
    async with running(tmp_path, ends("Hey")) as rig:
        answer = await respond(rig, top_logprobs=2)
        _, chat = await rig.chat(logprobs=True, top_logprobs=2)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["H", "e", "y"]
    assert logprobs == chat["choices"][0]["logprobs"]["content"]
    assert answer["top_logprobs"] == 2


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Hello, 👩‍👧!", {}),
        ("Hello!", {"tokens_per_output": 4}),
        ("Hello!", {"top_logprobs": 1}),
        ("Hello!", {"max_output_tokens": 2}),
        ("", {}),
        (f"<think>Rome.</think>Looking.{CALL}", {}),
        (f"<think>Rome.</think>{CALL}{CALL}", {"tokens_per_output": 7}),
        ("<think>Rome, wh", {}),
    ],
)
async def test_a_stream_ends_with_the_whole_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, options: dict[str, Any]
) -> None:
    fields = dict(options)
    script = {"tokens_per_output": fields.pop("tokens_per_output", 1)}
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(text, **script)) as rig:
        whole = await respond(rig, **fields)
        events = await stream_named(rig, PATH, input="Hi", **fields)
    assert nameless(events[-1][1]["response"]) == nameless(whole)


def nameless(value: Any) -> Any:
    """`value` without what differs between two answers to the same request."""
    if isinstance(value, dict):
        return {key: nameless(each) for key, each in value.items() if key not in NAMES_OF_ONE}
    return [nameless(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 1000}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"store": True}, "store"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_refusals_name_the_clients_field(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with running(tmp_path, ends("x")) as rig:
        for is_streamed in (False, True):
            status, answer = await rig.post(PATH, {"model": MODEL, "input": "Hi", "stream": is_streamed, **fields})
            assert (status, answer["error"]["param"]) == (400, param), answer
        assert not rig.engine.added


async def test_the_model_must_be_there(tmp_path: Path) -> None:
    async with running(tmp_path, ends("x")) as rig:
        status, answer = await rig.post(PATH, {"model": "other", "input": "Hi"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_request_that_fails_has_a_status(tmp_path: Path) -> None:
    async with running(tmp_path, breaks("")) as rig:
        status, answer = await rig.post(PATH, {"model": MODEL, "input": "Hi"})
    assert (status, answer["error"]["code"]) == (500, "numerical_error")
