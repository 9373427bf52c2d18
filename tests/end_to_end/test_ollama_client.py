"""Ollama's own client against the real processes with the replay engine; skipped where it is not installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_process import ServerProcess

ollama = pytest.importorskip("ollama")

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
LINES = (
    {"prompt_contains": "<tool_response>\nrain", "text": "It rains in Zürich."},
    {"prompt_contains": "weather", "text": f"Let me look. {CALL}"},
    {"prompt_contains": "<|im_start|>system\nBe brief.", "text": "Hi."},
    {"text": "Grüezi 🌍", "interval_ms": 5},
)
QUESTION: list[Any] = [{"role": "user", "content": "weather in Zürich"}]


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where
    """
    return f"rain in {city}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    script = tmp_path_factory.mktemp("replay") / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, LINES)))
    with ServerProcess(script, "--engine", "replay") as server:
        yield ollama.Client(host=server.url)


def test_a_conversation_with_a_tool(client: Any) -> None:
    first = client.chat(model=MODEL, messages=QUESTION, tools=[get_weather]).message
    (call,) = first.tool_calls
    assert (first.content, call.function.name, call.function.arguments) == (
        "Let me look.",
        "get_weather",
        {"city": "Zürich"},
    )
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    second = client.chat(model=MODEL, messages=[*QUESTION, first, result], tools=[get_weather])
    assert second.message.content == "It rains in Zürich."


def test_streams_join_to_the_whole_and_have_the_counts(client: Any) -> None:
    whole = client.generate(model=f"{MODEL}:latest", prompt="Hi")
    parts = list(client.generate(model=MODEL, prompt="Hi", stream=True))
    assert "".join(part.response for part in parts) == whole.response == "Grüezi 🌍"
    assert len(parts) > 2
    assert parts[-1].eval_count == whole.eval_count > 1
    assert parts[-1].eval_duration > 0 < whole.eval_duration
    assert client.generate(model=MODEL, prompt="Hi", system="Be brief.").response == "Hi."


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p") as problem:
        client.generate(model=MODEL, prompt="Hi", options={"top_p": 7})
    assert problem.value.status_code == 400
