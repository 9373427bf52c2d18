"""Tools and thoughts of chat requests: what the model is shown, how its answer is read, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from fake_engine import Script
from http_rig import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE, Rig, make_config, running, says

from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import AddRequest, FinishReason

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
OTHER_TOOL = {"type": "function", "function": {"name": "time"}}
ZURICH = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
BERN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TURNS = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "look it up",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
THINKING_TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}{{ '\\n' }}{% endfor %}"
    "assistant: <think>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)


def ends(text: str, **options: Any) -> Callable[[AddRequest], Script]:
    """The model says `text` and ends."""
    return lambda request: Script([*says(text)(request).token_ids, EOS_ID], FinishReason.STOP, EOS_ID, **options)


def config_with(directory: Path, template: str = THINKING_TEMPLATE) -> EngineConfig:
    config = make_config(directory, max_model_len=4096)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return config


@contextlib.asynccontextmanager
async def serving(
    directory: Path, script: Callable[[AddRequest], Script], config: EngineConfig | None = None
) -> AsyncIterator[Rig]:
    async with running(directory, script, config=config or make_config(directory, max_model_len=4096)) as rig:
        yield rig


def prompt_of(rig: Rig) -> str:
    """Return the text of the last prompt that the engine core got."""
    return rig.tokenizer.decode(rig.engine.added[-1].prompt_token_ids, skip_special_tokens=False)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def test_a_call_is_a_tool_call_of_the_message(tmp_path: Path) -> None:
    async with serving(tmp_path, ends("Let me see. " + ZURICH)) as rig:
        status, answer = await rig.chat(tools=[TOOL])
    assert status == 200
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Zürich"}'})
    assert call["id"].startswith("call_")
    assert "index" not in call


async def test_a_stream_numbers_the_calls_and_names_each_once(tmp_path: Path) -> None:
    async with serving(tmp_path, ends(ZURICH + "\n" + BERN, tokens_per_output=200)) as rig:
        *chunks, done = await rig.stream(CHAT, tools=[TOOL])
        _, answer = await rig.chat(tools=[TOOL])
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert calls_of({"tool_calls": calls}) == calls_of(answer["choices"][0]["message"])
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert answer["choices"][0]["message"]["content"] is None
    assert len({call["id"] for call in answer["choices"][0]["message"]["tool_calls"]}) == 2


@pytest.mark.parametrize("text", [ZURICH[:-20], BERN + "\n" + ZURICH[:-20]])
async def test_an_answer_that_is_cut_off_says_so_and_has_no_half_call(tmp_path: Path, text: str) -> None:
    async with serving(tmp_path, says(text)) as rig:
        _, answer = await rig.chat(tools=[TOOL], max_tokens=len(text.encode()))
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")
    assert len(choice["message"].get("tool_calls", ())) == text.count("</tool_call>")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_without_parallel_calls_the_first_one_ends_the_run(tmp_path: Path, is_streamed: bool) -> None:
    text = "So: " + BERN + "\n" + ZURICH
    async with serving(
        tmp_path, lambda request: Script([*says(text)(request).token_ids] * 99, interval_s=0.001)
    ) as rig:
        fields: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 3000}
        if is_streamed:
            chunks = [chunk["choices"][0] for chunk in (await rig.stream(CHAT, **fields))[:-1]]
            calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
            message, reason = {"tool_calls": calls}, chunks[-1]["finish_reason"]
        else:
            _, answer = await rig.chat(**fields)
            message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
            assert answer["usage"]["completion_tokens"] == len(("So: " + BERN).encode())
        await rig.until(lambda: rig.engine.aborted == [rig.engine.added[0].request_id])
    assert (calls_of(message), reason) == ([("weather", '{"city": "Bern"}')], "tool_calls")


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_without_tools_to_call_markup_is_text(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with serving(tmp_path, ends(ZURICH)) as rig:
        _, answer = await rig.chat(**fields)
        assert "weather" not in prompt_of(rig)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ZURICH, "stop")
    assert "tool_calls" not in choice["message"]
    assert "completion_tokens_details" not in answer["usage"], "nobody parsed this"


async def test_only_allowed_tools_may_be_called_but_all_are_shown(tmp_path: Path) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    async with serving(tmp_path, ends(ZURICH)) as rig:
        fields = {"tools": [TOOL, OTHER_TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
        status, _ = await rig.chat(**fields)
        assert status == 200
        assert '"weather"' in prompt_of(rig)
        assert '"time"' in prompt_of(rig)


async def test_a_template_that_knows_tools_gets_them_and_earlier_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, ends("ok"), config_with(tmp_path)) as rig:
        await rig.post(CHAT, {"model": "tiny", "messages": TURNS, "tools": [TOOL]})
        assert prompt_of(rig) == (
            f"TOOLS {json.dumps([TOOL])}\n"
            "user: weather?\n"
            "assistant: <think>look it up</think>"
            '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>\n'
            "tool: rain (c1)\nassistant: <think>"
        )


async def test_ids_of_earlier_calls_are_what_the_template_insists_on(tmp_path: Path) -> None:
    template = (
        "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}[TOOL_CALLS]{{ c.id }}"
        "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    async with serving(tmp_path, ends("ok"), config_with(tmp_path, template)) as rig:
        status, answer = await rig.post(CHAT, {"model": "tiny", "messages": TURNS})
        assert status == 200, answer
        assert prompt_of(rig) == "None[TOOL_CALLS]000000000000000000"


async def test_a_template_that_knows_none_gets_them_in_words(tmp_path: Path) -> None:
    async with serving(tmp_path, ends("ok")) as rig:
        await rig.post(CHAT, {"model": "tiny", "messages": TURNS, "tools": [TOOL]})
        with_tools = prompt_of(rig)
        await rig.post(CHAT, {"model": "tiny", "messages": TURNS})
        without_tools = prompt_of(rig)
    turns = (
        "<|im_start|>user\nweather?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert without_tools == turns
    assert with_tools.startswith("<|im_start|>system\n# Tools")
    assert '"description":"Tells it."' in with_tools
    assert with_tools.endswith(turns)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_thought_has_two_names_and_is_counted(tmp_path: Path, is_streamed: bool) -> None:
    thought, answer = "hm, 漢字", "42"
    async with serving(tmp_path, ends(f"{thought}</think>\n\n{answer}"), config_with(tmp_path)) as rig:
        if is_streamed:
            events = await rig.stream(CHAT, stream_options={"include_usage": True})
            deltas, usage = [chunk["choices"][0]["delta"] for chunk in events[:-2]], events[-2]["usage"]
            found = [
                "".join(delta.get(name, "") for delta in deltas)
                for name in ("reasoning_content", "reasoning", "content")
            ]
        else:
            _, whole = await rig.chat()
            usage, message = whole["usage"], whole["choices"][0]["message"]
            found = [message[name] for name in ("reasoning_content", "reasoning", "content")]
    assert found == [thought, thought, answer]
    num_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(thought.encode()) <= num_tokens <= len(f"{thought}</think>\n\n".encode())


async def test_the_template_may_be_told_not_to_let_the_model_think(tmp_path: Path) -> None:
    async with serving(tmp_path, ends("42"), config_with(tmp_path)) as rig:
        _, answer = await rig.chat(chat_template_kwargs={"enable_thinking": False})
        assert prompt_of(rig).endswith("<think></think>")
    message = answer["choices"][0]["message"]
    assert message["content"] == "42"
    assert "reasoning_content" not in message
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_markers_that_are_special_tokens_reach_the_parser_and_eos_does_not(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_model_len=4096)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, "<tool_call>", "</tool_call>"])
    tokenizer.save(str(path))
    body = [*says('{"name": "weather", "arguments": {}}')(None).token_ids]  # type: ignore[arg-type]
    tokens = [VOCAB_SIZE, *body, VOCAB_SIZE + 1, EOS_ID, *says("b")(None).token_ids]  # type: ignore[arg-type]
    model = msgspec.structs.replace(config.model, vocab_size=VOCAB_SIZE + 2)
    async with serving(tmp_path, lambda _: Script(tokens), msgspec.structs.replace(config, model=model)) as rig:
        _, answer = await rig.chat(tools=[TOOL], ignore_eos=True, max_tokens=len(tokens))
        _, plain = await rig.chat(ignore_eos=True, max_tokens=len(tokens))
    message = answer["choices"][0]["message"]
    assert (calls_of(message), message["content"]) == ([("weather", "{}")], "b")
    assert plain["choices"][0]["message"]["content"] == '{"name": "weather", "arguments": {}}b'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": "weather"}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [TOOL], "functions": [{"name": "f"}]}, "functions"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with serving(tmp_path, ends("no")) as rig:
        status, answer = await rig.chat(**fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param


async def test_each_choice_is_read_on_its_own(tmp_path: Path) -> None:
    texts = [ZURICH, "no call", BERN]
    async with serving(tmp_path, lambda request: ends(texts[request.sampling_params.choice_index])(request)) as rig:
        _, answer = await rig.chat(tools=[TOOL], n=3)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop", "tool_calls"]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [None, "no call", None]
