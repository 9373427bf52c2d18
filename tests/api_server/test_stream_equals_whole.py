"""A stream, joined, is the answer that is not streamed: generated requests, over sockets, to both endpoints."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_engine import Script
from http_rig import EOS_ID, Rig, running, says
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.protocol.engine_messages import AddRequest, FinishReason

CHAT, COMPLETIONS = PATHS = ("/v1/chat/completions", "/v1/completions")
PIECES = ("a", "b", "ab", " ", "\n", "é", "漢", "字", "😀", "👩‍👧", "\u0301", "stop")
SPECIAL_ID = EOS_ID - 1
PROMPT = "Hé, 漢!"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é</tool_call>"}}\n</tool_call>'
MARKUP = (CALL, CALL[:30], "<tool_call>", "</tool_call>", "<think>", "</think>", "\n")
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def ids_of(text: str) -> list[int]:
    return [*says(text)(None).token_ids]  # type: ignore[arg-type]


def id_of(byte: int) -> int:
    """Return the token of one byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's alphabet
    others = [each for each in range(256) if each not in printable]
    return sorted(alphabet).index(chr(byte if byte in printable else 256 + others.index(byte)))


class Part(NamedTuple):
    """Some tokens of an output and the text that they give, if what follows does not go on with a character."""

    token_ids: list[int]
    text: str


PARTS = [
    *(Part(ids_of(piece), piece) for piece in PIECES),
    Part(ids_of("😀")[:2], "\ufffd"),
    Part(ids_of("é")[1:], "\ufffd"),
    Part([SPECIAL_ID], ""),
]
MARKUP_PARTS = [Part(ids_of(piece), piece) for piece in MARKUP]


@dataclass(frozen=True)
class Case:
    """A request, and what the engine core says to each of its choices."""

    path: str
    outputs: tuple[tuple[int, ...], ...]
    ends_by_eos: bool
    pace: int
    fields: dict[str, Any]


BYTES = {token_id: bytes([byte]) for byte in range(256) for token_id in [id_of(byte)]}
SPECIAL_TEXT = {True: b"", False: b"<|im_start|>"}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    path = draw(st.sampled_from(PATHS))
    has_tools = path == CHAT and draw(st.booleans())
    parts = st.sampled_from([*MARKUP_PARTS, *PARTS] if has_tools else PARTS)
    answers = draw(st.lists(st.lists(parts, max_size=8), min_size=1, max_size=3))
    outputs = tuple(tuple(token_id for part in parts for token_id in part.token_ids) for parts in answers)
    text = "".join(part.text for part in answers[0]) + draw(st.sampled_from(PIECES))
    begin = draw(st.integers(0, len(text) - 1))
    stops = [text[begin : begin + draw(st.integers(1, 4))], *draw(st.lists(st.sampled_from(PIECES), max_size=2))]
    ends_by_eos = draw(st.booleans())
    fields: dict[str, Any] = {
        "n": len(outputs),
        "stop": draw(st.sampled_from([None, stops[0], stops])),
        "include_stop_str_in_output": draw(st.booleans()),
        "min_tokens": draw(st.sampled_from([0, 0, 1, 3])),
        "max_tokens": 1000 if ends_by_eos else max(3, *map(len, outputs)),
        "skip_special_tokens": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
    }
    if has_tools:
        fields |= {"tools": TOOLS, "parallel_tool_calls": draw(st.booleans())}
    num_listed = draw(st.sampled_from([None, 0, 2]))
    if path == CHAT:
        fields |= {"logprobs": num_listed is not None, "top_logprobs": num_listed}
        fields = fields if num_listed is not None else {**fields, "top_logprobs": None}
    else:
        fields |= {"logprobs": num_listed, "echo": draw(st.booleans()), "prompt": PROMPT}
    return Case(path, outputs, ends_by_eos, draw(st.integers(1, 6)), fields)


class Server:
    """A rig in a thread of its own, for tests that are not coroutines."""

    def __init__(self, directory: Path) -> None:
        self.case: Case | None = None
        self.pace = 1
        self.loop = asyncio.new_event_loop()
        self.rig: Rig | None = None
        self._ready, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(directory),))
        self._thread.start()
        assert self._ready.wait(20)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self.loop.close()

    async def _run(self, directory: Path) -> None:
        async with running(directory, self._script, max_model_len=4096) as self.rig:
            self._ready.set()
            await self._ended.wait()

    def _script(self, request: AddRequest) -> Script:
        assert self.case is not None
        output = self.case.outputs[request.sampling_params.choice_index]
        rows = {"tokens_per_output": self.pace, "prompt_rows_per_output": self.pace}
        if self.case.ends_by_eos:
            return Script([*output, EOS_ID], FinishReason.STOP, EOS_ID, **rows)
        return Script([*output, *itertools.repeat(40, 200)], FinishReason.LENGTH, **rows)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("octavo"))
    yield server
    server.end()


def joined(events: list[Any], path: str) -> tuple[list[Any], Any]:
    """Return the choices and the usage that the chunks of a stream add up to, in the form of a whole answer."""
    *chunks, usage_chunk, done = events
    assert done == "[DONE]"
    found: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        so_far = found.setdefault(choice["index"], {"text": "", "index": choice["index"]})
        assert "finish_reason" not in so_far, "something came after the end"
        so_far["text"] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
        so_far.setdefault("calls", []).extend(choice.get("delta", {}).get("tool_calls", ()))
        if choice.get("logprobs") is not None:
            add(so_far.setdefault("logprobs", {}), choice["logprobs"])
        if "token_ids" in choice:
            so_far.setdefault("token_ids", []).extend(choice["token_ids"])
        if choice["finish_reason"] is not None:
            so_far |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
    for so_far in found.values():
        assert [call.pop("index") for call in so_far["calls"]] == [*range(len(so_far["calls"]))]
        so_far["calls"] = without_ids(so_far["calls"])
    return [found[index] for index in sorted(found)], usage_chunk["usage"]


def without_ids(calls: list[Any]) -> list[Any]:
    """Ids are the answer's own."""
    assert len({call["id"] for call in calls}) == len(calls)
    return [{**call, "id": None} for call in calls]


def add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for name, entries in part.items():
        if entries is not None:
            total.setdefault(name, []).extend(entries)


def whole_choice(choice: Any, path: str) -> Any:
    result = {
        "text": choice["message"]["content"] or "" if path == CHAT else choice["text"],
        "calls": without_ids(choice["message"].get("tool_calls", [])) if path == CHAT else [],
        "index": choice["index"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
    }
    if choice["logprobs"] is not None:
        result["logprobs"] = {}
        add(result["logprobs"], choice["logprobs"])
    if "token_ids" in choice:
        result["token_ids"] = choice["token_ids"]
    return result


def without_empty_logprobs(choice: Any) -> Any:
    """A stream without any text has no chunk that could say that there are no logprobs."""
    return {name: value for name, value in choice.items() if name != "logprobs" or any(value.values())}


@given(case=cases())
@settings(max_examples=500, deadline=None)
def test_a_stream_joined_is_the_whole_answer(server: Server, case: Case) -> None:
    rig = server.rig
    assert rig is not None
    server.case, server.pace = case, 7
    status, answer = server.do((rig.chat if case.path == CHAT else rig.complete)(**case.fields))
    assert status == 200, answer
    server.pace = case.pace
    events = server.do(rig.stream(case.path, **case.fields, stream_options={"include_usage": True}))
    choices, usage = joined(events, case.path)
    expected = [whole_choice(choice, case.path) for choice in answer["choices"]]
    assert list(map(without_empty_logprobs, choices)) == list(map(without_empty_logprobs, expected))
    assert usage == answer["usage"]
    for choice in expected if "tools" not in case.fields else ():  # with tools, some of the text is markup
        check_text(choice, case)
        check_bytes(choice, case)


def check_text(choice: Any, case: Case) -> None:
    """The text is that of the tokens up to the stop string that is complete first, of those the longest."""
    output = case.outputs[choice["index"]][: case.fields["max_tokens"]]
    filler = "" if case.ends_by_eos else "I" * (case.fields["max_tokens"] - len(output))
    shown = b"".join(BYTES.get(token_id, SPECIAL_TEXT[case.fields["skip_special_tokens"]]) for token_id in output)
    text = shown.decode(errors="replace") if not filler else (shown + filler.encode()).decode(errors="replace")
    stop = case.fields["stop"]
    stops = [stop] if isinstance(stop, str) else stop or []
    for end in range(len(text)):
        ending = [each for each in stops if text[: end + 1].endswith(each)]
        if ending and case.fields["min_tokens"] == 0:
            longest = max(ending, key=len)
            text = text[: end + 1 - (0 if case.fields["include_stop_str_in_output"] else len(longest))]
            assert choice["stop_reason"] == longest
            break
    if case.fields["min_tokens"] == 0:
        assert choice["text"] == (PROMPT if case.fields.get("echo") else "") + text


def check_bytes(choice: Any, case: Case) -> None:
    """The bytes of a chat's entries are those of its text, but for what is no text and what a stop string cut."""
    is_cut = isinstance(choice["stop_reason"], str)
    if case.path == CHAT and "logprobs" in choice and not is_cut and "\ufffd" not in choice["text"]:
        found = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        assert found == choice["text"].encode()
