"""A stream, joined, is the answer that is not streamed: output that a parser reads, in every format, on every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fake_engine import Script
from http_rig import EOS_ID, MODEL, make_config, says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_joins import CHAT, MESSAGES, RESPONSES, Joined, joined_stream, whole_answer
from threaded_rig import ThreadedRig

from octavo.api_server.parsers.selection import FAMILIES, OPENERS, THINK_OPENERS
from octavo.protocol.engine_messages import AddRequest, FinishReason

THINK = ("<think>", "Hm é.", "</think>")
FRAGMENTS = {  # family -> what its outputs are made of, besides text
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", '{"a": "é"}', "<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁end｜>", *THINK),
    ),
    "deepseek_dsml": (
        *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">漢'),
        *("</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>", *THINK),
    ),
    "gemma": ("<|tool_call>call:f{", 'a:<|"|>é<|"|>', "}<tool_call|>", "<|channel>thought\n", "Hm.", "<channel|>"),
    "glm": ("<tool_call>f", "<arg_key>a</arg_key>", "<arg_value>é</arg_value>", "</tool_call>", *THINK),
    "harmony": (
        *("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", '{"a": "é"}', "<|call|>", "<|end|>"),
        *("<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "Hm.", "<|return|>"),
    ),
    "hermes": ('<tool_call>\n{"name": "f", "arguments": ', '{"a": "</tool_call>é"}', "}", "\n</tool_call>", *THINK),
    "kimi": (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", '{"a": "é"}'),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", *THINK),
    ),
    "kimi_k3": (
        *("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        *('<|open|>call tool="f" index="1"<|sep|>', '<|open|>argument key="a" type="string"<|sep|>é'),
        *("<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|close|>message<|sep|>"),
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "llama_json": ("<|python_tag|>", '{"name": "f", "parameters": {"a": ', '"é"', "}}", "; "),
    "mistral": ("[TOOL_CALLS]", "f[ARGS]", '{"a": "é"}', "[THINK]", "Hm.", "[/THINK]"),
    "pythonic": ("[", "f(", "a='é'", ")", ", ", "]", "<|python_start|>", "<|python_end|>"),
    "qwen_xml": (
        *("<tool_call>\n", "<function=f>\n", "<parameter=a>\né\n", "</parameter>\n", "</function>\n", "</tool_call>"),
        *THINK,
    ),
    "think": THINK,
}
WHOLE_CALLS = {  # family -> fragments that are a call, one after the other
    **{family: slice(0, 5) for family in ("deepseek", "kimi")},
    **{family: slice(0, 6) for family in ("deepseek_dsml", "qwen_xml")},
    **{family: slice(0, 4) for family in ("glm", "hermes", "llama_json")},
    **{family: slice(0, 3) for family in ("gemma", "harmony", "mistral")},
    "pythonic": slice(0, 4),
    "kimi_k3": slice(2, 8),
    "think": slice(0, 3),
}
TEXTS = ("a", " ", "\n", "stop", "漢字", "👩‍👧", "e\u0301", "<", "[")
PIECES = ("é", "st", "字", "Hm", "a")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    RESPONSES: [{"type": "function", "name": "f", "parameters": SCHEMA}],
    MESSAGES: [{"name": "f", "input_schema": SCHEMA}],
}
WITH_TOOLS = (CHAT,)  # the others refuse them still
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    "{% if reasoning_effort is defined or enable_thinking %}OPENER{% endif %}"
)


def whole_call(family: str) -> str:
    return "".join(FRAGMENTS[family][WHOLE_CALLS[family]])


@dataclass(frozen=True)
class Case:
    """A request, and the text of each of its choices."""

    path: str
    texts: tuple[str, ...]
    reason: FinishReason
    pace: int
    body: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    path = draw(st.sampled_from((CHAT, RESPONSES, MESSAGES)))
    parts = st.one_of(st.sampled_from(FRAGMENTS[family]), st.sampled_from(TEXTS), st.just(whole_call(family)))
    num_choices = draw(st.sampled_from((1, 1, 2))) if path == CHAT else 1
    texts = tuple("".join(draw(st.lists(parts, max_size=8))) for _ in range(num_choices))
    reason = draw(st.sampled_from((FinishReason.STOP, FinishReason.LENGTH)))
    body = {"model": MODEL, **draw(FIELDS[path])}
    if path in WITH_TOOLS and draw(st.booleans()):
        body["tools"] = TOOLS[path]
    return Case(path, texts, reason, draw(st.sampled_from((1, 2, 3, 5, 8, 40))), body)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda dicts: {name: value for each in dicts for name, value in each.items()})


USER = [{"role": "user", "content": "Hi"}]
STOPS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3)
CHAT_FIELDS = merged(
    st.just({"messages": USER}),
    st.sampled_from(({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2})),
    optional(
        stop=STOPS,
        reasoning_effort=st.just("low"),
        parallel_tool_calls=st.booleans(),
        return_token_ids=st.booleans(),
        min_tokens=st.integers(0, 9),
        include_stop_str_in_output=st.booleans(),
        skip_special_tokens=st.booleans(),
    ),
)
RESPONSES_FIELDS = merged(
    st.just({"input": USER}),
    optional(
        top_logprobs=st.sampled_from((0, 2)),
        include=st.just(["message.output_text.logprobs"]),
        reasoning=st.just({"effort": "low"}),
        parallel_tool_calls=st.booleans(),
    ),
)
MESSAGES_FIELDS = merged(
    st.just({"messages": USER, "max_tokens": 2000}),
    optional(stop_sequences=STOPS, thinking=st.just({"type": "adaptive"})),
)
FIELDS = {CHAT: CHAT_FIELDS, RESPONSES: RESPONSES_FIELDS, MESSAGES: MESSAGES_FIELDS}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ThreadedRig]]:
    """A family, and a rig whose model writes its format; a thought begins in the prompt when a request asks for it."""
    family, directory = request.param, tmp_path_factory.mktemp("octavo")
    parser = {"reasoning_parser": family} if family == "think" else {"tool_call_parser": family}
    config = make_config(directory, max_model_len=4096, **parser)
    template = TEMPLATE.replace("OPENER", OPENERS.get(family, THINK_OPENERS)[0])
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    rig = ThreadedRig(config)
    yield family, rig
    rig.end()


async def answers(rig: ThreadedRig, case: Case) -> tuple[Joined, Joined]:
    """Return the answer that is streamed and the one that is not, with output cut up in two ways."""

    def script(pace: int, request: AddRequest) -> Script:
        token_ids = says(case.texts[request.sampling_params.choice_index])(request).token_ids
        if case.reason is FinishReason.STOP:
            return Script([*token_ids, EOS_ID], case.reason, EOS_ID, tokens_per_output=pace)
        return Script(token_ids or [40], case.reason, tokens_per_output=pace)

    options = {"stream_options": {"include_usage": True}} if case.path == CHAT else {}
    body = {**case.body, "n": len(case.texts)} if case.path == CHAT else case.body
    rig.script = lambda request: script(case.pace, request)
    async with rig.rig.session.post(case.path, json={**body, "stream": True, **options}) as response:
        assert response.status == 200, await response.text()
        streamed = joined_stream(case.path, (await response.read()).decode())
    rig.script = lambda request: script(7, request)
    status, whole = await rig.rig.post(case.path, body)
    assert status == 200, whole
    return streamed, whole_answer(case.path, whole)


def test_a_stream_joined_is_the_whole_answer(served: tuple[str, ThreadedRig]) -> None:
    family, rig = served

    @given(case=cases(family))
    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def check(case: Case) -> None:
        streamed, whole = rig.do(answers(rig, case))
        assert streamed == whole

    check()
