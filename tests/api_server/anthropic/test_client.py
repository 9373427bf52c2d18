"""Anthropic's own client against the server, where it is installed (`pip install anthropic`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_rig import MODEL, running
from named_streams import CALL, WEATHER, ends, parse_as

anthropic = pytest.importorskip("anthropic")
HELLO = [{"role": "user", "content": "Hi"}]


async def test_it_reads_answers_streams_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with (
        running(tmp_path, ends(f"<think>Hm</think>Looking.{CALL}")) as rig,
        anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0) as client,
    ):
        whole = await client.messages.create(model=MODEL, max_tokens=200, messages=HELLO)
        async with client.messages.stream(model=MODEL, max_tokens=200, messages=HELLO) as stream:
            text = "".join([each async for each in stream.text_stream])
            message = await stream.get_final_message()
        count = await client.messages.count_tokens(model=MODEL, messages=HELLO)
        with pytest.raises(anthropic.NotFoundError) as problem:
            await client.messages.create(model="other", max_tokens=200, messages=HELLO)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert text == message.content[1].text == "Looking."
    assert message.content[2].input == whole.content[2].input == {"city": "Rome"}
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert count.input_tokens == whole.usage.input_tokens
    assert problem.value.body["error"]["type"] == "not_found_error"
