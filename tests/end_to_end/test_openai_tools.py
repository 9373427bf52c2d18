"""The official OpenAI client with its own tool helpers against the replay engine; skipped where it is not installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_process import ServerProcess

pytest.importorskip("openai")

import openai
import pydantic

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"


class Weather(pydantic.BaseModel):
    """Tells the weather."""

    city: str
    days: int


TOOL = openai.pydantic_function_tool(Weather, name="weather")
CALLS = "\n".join(
    "<tool_call>\n" + json.dumps({"name": "weather", "arguments": {"city": city, "days": 3}}) + "\n</tool_call>"
    for city in ("Zürich", "Bern")
)
LINES = (
    {"prompt_contains": "<tool_response>\nrain", "text": "It rains in Zürich."},
    {"prompt_contains": "both cities", "text": "Let me look. " + CALLS},
)
QUESTION: list[Any] = [{"role": "user", "content": "weather in both cities"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    script = tmp_path_factory.mktemp("replay") / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, LINES)))
    with (
        ServerProcess(script, "--engine", "replay") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        yield client


def test_a_conversation_with_tools(client: openai.OpenAI) -> None:
    first = client.chat.completions.parse(model=MODEL, messages=QUESTION, tools=[TOOL])
    (choice,) = first.choices
    calls = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert [call.function.parsed_arguments for call in calls] == [
        Weather(city="Zürich", days=3),
        Weather(city="Bern", days=3),
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    messages = [*QUESTION, choice.message.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It rains in Zürich."
    assert second.choices[0].finish_reason == "stop"


def test_the_stream_helper_sees_every_call_and_ends_with_the_same_message(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(model=MODEL, messages=QUESTION, tools=[TOOL]).choices[0].message
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[TOOL]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.index, event.name, event.parsed_arguments) for event in done] == [
        (0, "weather", Weather(city="Zürich", days=3)),
        (1, "weather", Weather(city="Bern", days=3)),
    ]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == whole.content
    assert [call.function for call in final.message.tool_calls or []] == [
        call.function for call in whole.tool_calls or []
    ]


def test_a_forced_call_is_a_typed_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="needs grammars") as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required")
    assert caught.value.param == "tool_choice"
