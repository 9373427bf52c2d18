"""POST /v1/messages and the count of its tokens, over real sockets: answers, streams and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from http_rig import MODEL, Rig, running
from hypothesis import given
from hypothesis import strategies as st
from named_streams import CALL, WEATHER, NamedEvent, breaks, ends, parse_as, stream_named

from octavo.api_server.anthropic.blocks import BlockWriter
from octavo.api_server.errors import ApiError, ErrorKind, ErrorShape
from octavo.api_server.generation.job import OutputEvent
from octavo.api_server.parsers.base import ToolCall

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA_FIELDS = {  # what Anthropic's schema requires
    *("id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container"),
}
LETTERS = {
    "message_start": "s",
    "ping": "p",
    "content_block_start": "(",
    "content_block_delta": "d",
    "content_block_stop": ")",
    "message_delta": "m",
    "message_stop": "$",
    "error": "!",
}


async def send(rig: Rig, **fields: Any) -> Any:
    status, answer = await rig.post(PATH, {"model": MODEL, "max_tokens": 200, "messages": HELLO, **fields})
    assert status == 200, answer
    return answer


async def stream(rig: Rig, **fields: Any) -> list[NamedEvent]:
    return await stream_named(rig, PATH, **{"max_tokens": 200, "messages": HELLO, **fields})


def joined(events: list[NamedEvent]) -> Any:
    """The message that a stream's events make, put together as Anthropic's clients do it."""
    message: Any = None
    inputs: dict[int, str] = {}
    for name, data in events:
        if name == "message_start":
            message = data["message"]
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], dict(data["delta"])
            kind = delta.pop("type")
            ((key, text),) = delta.items()
            if kind == "input_json_delta":
                inputs[data["index"]] = inputs.get(data["index"], "") + text
            else:
                assert kind == f"{block['type']}_delta"
                block[key] += text
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] |= data["usage"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


async def test_the_answer_has_exactly_the_fields_of_the_schema(tmp_path: Path) -> None:
    async with running(tmp_path, ends("Hello!", num_cached_tokens=3)) as rig:
        answer = await send(rig)
        _, counted = await rig.post(COUNT, {"model": MODEL, "messages": HELLO})
    assert answer.keys() == SCHEMA_FIELDS
    assert answer.pop("id").startswith("msg_")
    assert answer.pop("usage") == {
        "input_tokens": counted["input_tokens"] - 3,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "output_tokens": 7,
        "cache_creation": None,
        "inference_geo": None,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": "standard",
    }
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello!", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("Hello!", {}, "end_turn", None),
        ("Hello!", {"max_tokens": 2}, "max_tokens", None),
        ("Hello!", {"stop_sequences": ["x", "lo"]}, "stop_sequence", "lo"),
        (f"Yo{CALL}", {}, "tool_use", None),
    ],
)
async def test_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fields: Any, reason: str, sequence: str | None
) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(text)) as rig:
        answer = await send(rig, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


async def test_thoughts_and_calls_are_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(f"<think>Rome.</think>Looking.{CALL}{CALL}")) as rig:
        thought, text, *calls = (await send(rig))["content"]
    assert thought == {"type": "thinking", "thinking": "Rome.", "signature": ""}
    assert text["text"] == "Looking."
    assert len({call.pop("id") for call in calls}) == 2
    assert (
        calls
        == [{"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}, "caller": {"type": "direct"}}] * 2
    )


@pytest.mark.parametrize(
    ("text", "fields", "word"),
    [
        ("Hey", {}, "sp(d)m$"),
        ("", {}, "sp()m$"),
        ("Hello!", {"max_tokens": 2}, "sp(d)m$"),
        ("Hello!", {"stop_sequences": ["lo"]}, "sp(d)m$"),
        ("Hello, 👩‍👧!", {}, "sp(d)m$"),
        ("<think>Hm</think>Yo", {}, "sp(d)(d)m$"),
        (f"<think>Hm</think>Yo{CALL}{CALL}", {}, "sp(d)(d)(d)(d)m$"),
        ("<think>Rome, wh", {}, "sp(d)m$"),
    ],
)
async def test_a_stream_is_the_whole_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fields: dict[str, Any], word: str
) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(text, num_cached_tokens=2)) as rig:
        whole, events = await send(rig, **fields), await stream(rig, **fields)
    assert re.sub("d+", "d", "".join(LETTERS[name] for name, _ in events)) == word
    usage = events[0][1]["message"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (whole["usage"]["input_tokens"], 0)
    message = joined(events)
    for each in (whole, message):
        each.pop("id")
        for block in each["content"]:
            block.pop("id", None)
    assert message == whole


async def test_a_stream_that_breaks_ends_with_the_error(tmp_path: Path) -> None:
    async with running(tmp_path, breaks("Hey")) as rig:
        events = await stream(rig)
    assert re.fullmatch(r"sp\(d+!", "".join(LETTERS[name] for name, _ in events))
    error = events[-1][1]
    assert (error["error"]["type"], error["error"]["code"]) == ("api_error", "numerical_error")
    assert error["request_id"]


async def test_a_last_message_of_the_assistant_is_the_end_of_the_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, ends("x")) as rig:
        await send(rig, messages=[*HELLO, {"role": "assistant", "content": "The answer is"}])
        (request,) = rig.engine.added
        prompt = rig.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nThe answer is")


async def test_the_count_is_that_of_the_prompt(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "thinking": {"type": "disabled"}}
    async with running(tmp_path, ends("x")) as rig:
        status, answer = await rig.post(COUNT, body)
        await send(rig, **body)
        (request,) = rig.engine.added
    assert (status, answer) == (200, {"input_tokens": len(request.prompt_token_ids)})


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_errors_have_anthropics_shape(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, ends("x")) as rig:
        body = {"model": "other", "max_tokens": 5, "messages": HELLO}
        async with rig.session.post(path, json=body, headers={"X-Request-Id": "mine"}) as response:
            assert response.status == 404
            answer = await response.json()
        error = answer["error"]
        assert (answer["type"], answer["request_id"]) == ("error", "mine")
        assert (error["type"], error["code"], error["param"]) == ("not_found_error", "model_not_found", "model")
        status, answer = await rig.post(path, {**body, "model": MODEL, "messages": []})
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert answer["error"]["param"] == "messages"
        async with rig.session.get(path) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")
        _, answer = await rig.post("/v1/chat/completions", {})
        assert answer.keys() == {"error"}


async def test_without_a_key_the_error_is_one_of_authentication(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "a"\nkey = "sk-a-7f3a"\n')
    keys.chmod(0o600)
    async with running(tmp_path, ends("x"), api_key_file=str(keys)) as rig:
        status, answer = await rig.post(PATH, {"model": MODEL, "max_tokens": 5, "messages": HELLO})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(
    ("kind", "error_type"),
    [
        (ErrorKind.INVALID_VALUE, "invalid_request_error"),
        (ErrorKind.METHOD_NOT_ALLOWED, "invalid_request_error"),
        (ErrorKind.HOST_NOT_ALLOWED, "permission_error"),
        (ErrorKind.BODY_TOO_LARGE, "request_too_large"),
        (ErrorKind.OVERLOADED, "rate_limit_error"),
        (ErrorKind.INTERNAL, "api_error"),
        (ErrorKind.SHUTTING_DOWN, "overloaded_error"),
        (ErrorKind.REQUEST_TIMEOUT, "timeout_error"),
    ],
)
def test_the_type_of_an_error_is_that_of_its_status(kind: ErrorKind, error_type: str) -> None:
    body = json.loads(ApiError(kind, "x", "p").render(ErrorShape.ANTHROPIC, "r"))
    error = {"message": "x", "type": error_type, "param": "p", "code": kind.value[2]}
    assert body == {"type": "error", "error": error, "request_id": "r"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
    ],
)
async def test_refusals_name_the_clients_field(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with running(tmp_path, ends("x")) as rig:
        for is_streamed in (False, True):
            body = {"model": MODEL, "max_tokens": 5, "messages": HELLO, "stream": is_streamed, **fields}
            status, answer = await rig.post(PATH, body)
            assert (status, answer["error"]["param"]) == (400, param), answer
        assert not rig.engine.added


PIECES = st.lists(
    st.one_of(
        st.text("ab", min_size=1, max_size=3).map(lambda text: OutputEvent(0, text)),
        st.text("ab", min_size=1, max_size=3).map(lambda text: OutputEvent(0, reasoning=text)),
        st.just(OutputEvent(0, tool_calls=(ToolCall("f", "{}"),))),
    ),
    max_size=8,
)


@given(PIECES)
def test_blocks_alternate_whatever_the_order(pieces: list[OutputEvent]) -> None:
    writer = BlockWriter()
    events = [event for piece in pieces for event in writer.add(piece)] + writer.finish()
    word = "".join(LETTERS[str(event.__struct_config__.tag)] for event in events)
    assert re.fullmatch(r"(?:\(d+\))+|\(\)", word)
    assert word.count("(") == len(writer.blocks)
    said = "".join(getattr(block, "text", "") + getattr(block, "thinking", "") for block in writer.blocks)
    assert said == "".join(piece.content + piece.reasoning for piece in pieces)
