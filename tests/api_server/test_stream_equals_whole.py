"""A stream, joined, is the answer that is not streamed: generated requests, over sockets, to OpenAI's endpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from fake_engine import Script
from http_rig import EOS_ID, MODEL, make_config, says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_joins import CHAT, COMPLETIONS, Joined, joined_stream, whole_answer
from threaded_rig import ThreadedRig
from tokenizers import pre_tokenizers

from octavo.protocol.engine_messages import AddRequest, FinishReason

PATHS = (CHAT, COMPLETIONS)
PIECES = ("a", "b", "ab", " ", "\n", "é", "漢", "字", "😀", "👩‍👧", "\u0301", "stop")
SPECIAL_ID = EOS_ID - 1
PROMPT = "Hé, 漢!"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é</tool_call>"}}\n</tool_call>'
MARKUP = (CALL, CALL[:30], "<tool_call>", "</tool_call>", "<think>", "</think>", "\n")
USER = [{"role": "user", "content": "Hi"}]
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
        fields |= {"logprobs": num_listed is not None, "top_logprobs": num_listed, "messages": USER}
    else:
        prompt = [PROMPT] * draw(st.integers(1, 2))
        fields |= {"logprobs": num_listed, "echo": draw(st.booleans()), "prompt": prompt}
    return Case(path, outputs, ends_by_eos, draw(st.integers(1, 6)), fields)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedRig]:
    rig = ThreadedRig(make_config(tmp_path_factory.mktemp("octavo"), max_model_len=4096))
    yield rig
    rig.end()


def script(case: Case, pace: int, request: AddRequest) -> Script:
    output = case.outputs[request.sampling_params.choice_index]
    rows = {"tokens_per_output": pace, "prompt_rows_per_output": pace}
    if case.ends_by_eos:
        return Script([*output, EOS_ID], FinishReason.STOP, EOS_ID, **rows)
    return Script([*output, *itertools.repeat(40, 200)], FinishReason.LENGTH, **rows)


async def answers(server: ThreadedRig, case: Case) -> tuple[Joined, Joined]:
    """Return the answer that is streamed and the one that is not, with output cut up in two ways."""
    body = {"model": MODEL, **case.fields}
    server.script = lambda request: script(case, 7, request)
    status, whole = await server.rig.post(case.path, body)
    assert status == 200, whole
    server.script = lambda request: script(case, case.pace, request)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with server.rig.session.post(case.path, json=body) as response:
        assert response.status == 200, await response.text()
        return joined_stream(case.path, (await response.read()).decode()), whole_answer(case.path, whole)


@given(case=cases())
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_stream_joined_is_the_whole_answer(server: ThreadedRig, case: Case) -> None:
    streamed, whole = server.do(answers(server, case))
    assert streamed == whole
    for choice in whole.choices if "tools" not in case.fields else ():  # with tools, some of the text is markup
        check_text(choice, case)
        check_bytes(choice, case)


def check_text(choice: Any, case: Case) -> None:
    """The text is that of the tokens up to the stop string that is complete first, of those the longest."""
    output = case.outputs[choice["index"] % len(case.outputs)][: case.fields["max_tokens"]]
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
