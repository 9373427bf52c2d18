"""Ollama's own client against the server, where it is installed (`pip install ollama`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_rig import MODEL, running
from named_streams import CALL, WEATHER, breaks, ends, parse_as

ollama = pytest.importorskip("ollama")
HELLO = [{"role": "user", "content": "Hi"}]


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where
    """
    return city


async def test_it_reads_chats_streams_tools_lists_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(f"<think>Hm</think>Looking.{CALL}"), max_model_len=4096) as rig:
        client = ollama.AsyncClient(host=rig.url)
        whole = await client.chat(model=MODEL, messages=HELLO, tools=[get_weather], options={"temperature": 0})
        parts = [part async for part in await client.chat(model=MODEL, messages=HELLO, stream=True, think=True)]
        told = await client.generate(model=MODEL, prompt="Hi", system="Be brief.")
        names = [model.model for model in (await client.list()).models]
        shown = await client.show(MODEL)
        with pytest.raises(ollama.ResponseError, match="the model does not exist") as problem:
            await client.chat(model="other", messages=HELLO)
    assert (whole.message.content, whole.message.thinking) == ("Looking.", "Hm")
    assert [call.function.arguments for call in whole.message.tool_calls or ()] == [{"city": "Rome"}]
    assert "".join(part.message.content or "" for part in parts) == "Looking."
    assert (parts[-1].done, parts[-1].done_reason, parts[-1].eval_count) == (True, "stop", whole.eval_count)
    assert (told.response, told.thinking) == ("Looking.", "Hm")
    assert names == [MODEL, "org/alias"]
    assert shown.capabilities == ["completion", "tools"]
    assert problem.value.status_code == 404


async def test_a_stream_that_breaks_is_its_error(tmp_path: Path) -> None:
    async with running(tmp_path, breaks("Hel")) as rig:
        client = ollama.AsyncClient(host=rig.url)
        with pytest.raises(ollama.ResponseError, match="no numbers"):
            [part async for part in await client.generate(model=MODEL, prompt="Hi", stream=True)]
