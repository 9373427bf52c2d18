"""The events of a streamed response: their order, their places, and that their deltas are the texts."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from http_rig import MODEL, running, says
from hypothesis import given
from hypothesis import strategies as st
from named_streams import CALL, WEATHER, NamedEvent, breaks, ends, parse_as, stream_named

from octavo.api_server.generation.job import OutputEvent
from octavo.api_server.openai.responses_items import ItemWriter
from octavo.api_server.parsers.base import ToolCall

LETTERS = {  # one for each event, so that the order of a stream is a word
    "response.created": "c",
    "response.in_progress": "p",
    "response.output_item.added": "(",
    "response.content_part.added": "[",
    "response.output_text.delta": "t",
    "response.output_text.done": "T",
    "response.reasoning_text.delta": "r",
    "response.reasoning_text.done": "R",
    "response.content_part.done": "]",
    "response.function_call_arguments.delta": "a",
    "response.function_call_arguments.done": "A",
    "response.output_item.done": ")",
    "response.completed": "$",
    "response.incomplete": "$",
    "error": "!",
    "response.failed": "F",
}
ITEM = r"\(\[t+T\]\)|\(\[r+R\]\)|\(aA\)"
GOOD_STREAM = re.compile(rf"cp(?:{ITEM})+\$")
BROKEN_STREAM = re.compile(rf"cp(?:{ITEM})*(?:\(\[(?:t+|r+))?!F")


def word_of(events: list[NamedEvent]) -> str:
    return "".join(LETTERS[name] for name, _ in events)


async def events_of(tmp_path: Path, script: Any, **fields: Any) -> list[NamedEvent]:
    async with running(tmp_path, script) as rig:
        return await stream_named(rig, "/v1/responses", input="Hi", **fields)


def check_places(events: list[NamedEvent]) -> None:
    """Check numbers, ids and texts against the items that the response ends with."""
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    output = events[-1][1]["response"]["output"]
    deltas: dict[int, str] = defaultdict(str)
    for name, data in events[2:-1]:
        item = output[data["output_index"]]
        assert data.get("item_id", item["id"]) == item["id"]
        if name.endswith(".delta"):
            deltas[data["output_index"]] += data["delta"]
        elif name == "response.output_item.added":
            assert (data["item"]["id"], data["item"]["status"]) == (item["id"], "in_progress")
        elif name == "response.output_item.done":
            assert data["item"] == item
        elif name == "response.content_part.done":
            assert data["part"] == item["content"][0]
    assert [deltas[index] for index in range(len(output))] == [
        item.get("arguments", "") + "".join(part["text"] for part in item.get("content", [])) for item in output
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Hey", "cp([tT])$"),
        ("", "cp([tT])$"),
        ("<think>Hm</think>Yo", "cp([rR])([tT])$"),
        (f"<think>Hm</think>{CALL}", "cp([rR])(aA)$"),
        (f"Yo{CALL}{CALL}", "cp([tT])(aA)(aA)$"),
    ],
)
async def test_every_item_is_told_from_beginning_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str
) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    events = await events_of(tmp_path, ends(text))
    assert re.sub(r"([tr])\1+", r"\1", word_of(events)) == word
    assert GOOD_STREAM.fullmatch(word_of(events))
    check_places(events)


async def test_a_stream_that_is_cut_ends_incomplete(tmp_path: Path) -> None:
    events = await events_of(tmp_path, says("Hello!"), max_output_tokens=3)
    assert events[-1][0] == "response.incomplete"
    assert events[-1][1]["response"]["usage"]["output_tokens"] == 3


async def test_a_stream_that_breaks_says_why(tmp_path: Path) -> None:
    events = await events_of(tmp_path, breaks("Hey"))
    assert BROKEN_STREAM.fullmatch(word_of(events))
    (_, problem), (_, failed) = events[-2:]
    assert problem["code"] == problem["error"]["code"] == "numerical_error"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "numerical_error"


async def test_openais_client_puts_the_stream_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_as(monkeypatch, "hermes", WEATHER)
    async with running(tmp_path, ends(f"<think>Hm</think>Looking.{CALL}")) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
        async with client, client.responses.stream(model=MODEL, input="Hi") as stream:
            async for _ in stream:
                pass
            response = await stream.get_final_response()
    assert response.output_text == "Looking."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[2].arguments == '{"city": "Rome"}'  # type: ignore[union-attr]


PIECES = st.lists(
    st.one_of(
        st.text("ab", min_size=1, max_size=3).map(lambda text: OutputEvent(0, text)),
        st.text("ab", min_size=1, max_size=3).map(lambda text: OutputEvent(0, reasoning=text)),
        st.just(OutputEvent(0, tool_calls=(ToolCall("f", "{}"),))),
    ),
    max_size=8,
)


@given(PIECES, st.booleans())
def test_items_alternate_whatever_the_order(pieces: list[OutputEvent], is_cut: bool) -> None:
    writer = ItemWriter()
    events = [event for piece in pieces for event in writer.add(piece)] + writer.finish(is_cut=is_cut)
    word = "".join(LETTERS[str(event.__struct_config__.tag)] for event in events)
    assert re.fullmatch(rf"(?:{ITEM})+", word)
    kinds = [type(item).__name__ for item in writer.items]
    assert all(first != second or first == "FunctionCallItem" for first, second in pairwise(kinds))
    said = "".join(part.text for item in writer.items for part in getattr(item, "content", ()))
    assert said == "".join(piece.content + piece.reasoning for piece in pieces)
    assert kinds.count("FunctionCallItem") == sum(len(piece.tool_calls) for piece in pieces)
    assert [item.status for item in writer.items[:-1]] == ["completed"] * (len(kinds) - 1)
