"""Fields about sampling and prompts: what reaches the engine core, and prompts that are cut or continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_rig import EOS_ID, MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Rig, make_config, running, says

CHAT, COMPLETIONS = PATHS = ("/v1/chat/completions", "/v1/completions")
START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(says(text)(None).token_ids)  # type: ignore[arg-type]


async def ask(rig: Rig, path: str, **fields: Any) -> tuple[int, Any]:
    return await (rig.chat if path == CHAT else rig.complete)(**{"max_tokens": 1, **fields})


async def prompt_of(rig: Rig, **fields: Any) -> str:
    status, answer = await rig.post(CHAT, {"model": MODEL, "max_tokens": 1, **fields})
    assert status == 200, answer
    return rig.tokenizer.decode(rig.engine.added[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("path", PATHS)
async def test_penalties_and_token_lists_reach_the_engine(tmp_path: Path, path: str) -> None:
    fields = {
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": 100, "3": -100, "0": 0.5},
        "bad_words": ["ab", "c", " c"],
        "allowed_token_ids": [9, 3, 9],
    }
    async with running(tmp_path, says("x")) as rig:
        assert (await ask(rig, path, **fields))[0] == 200
        params = rig.engine.added[0].sampling_params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2, 0.5, 1.5)
    assert params.logit_bias == ((0, 0.5), (3, -100), (7, 100))
    assert params.bad_words == (ids_of("ab"), ids_of(" ab"), ids_of("c"), ids_of(" c"), ids_of("  c"))
    assert params.allowed_token_ids == (3, 9)


@pytest.mark.parametrize("path", PATHS)
async def test_b27_ids_between_the_tokenizer_and_the_width_of_the_logits_are_refused(tmp_path: Path, path: str) -> None:
    config = make_config(tmp_path)
    model = msgspec.structs.replace(config.model, vocab_size=VOCAB_SIZE + 100)
    wide = msgspec.structs.replace(config, model=model)
    async with running(tmp_path, says("x"), config=wide) as rig:
        for fields in ({"logit_bias": {str(VOCAB_SIZE): 1}}, {"allowed_token_ids": [VOCAB_SIZE]}):
            status, answer = await ask(rig, path, **fields)
            assert (status, answer["error"]["param"]) == (400, next(iter(fields)))
        assert (await ask(rig, path, logit_bias={str(VOCAB_SIZE - 1): 1}))[0] == 200


@pytest.mark.parametrize(("kept", "expected"), [(3, "fgh"), (8, "abcdefgh"), (500, "abcdefgh"), (-1, "abcdefgh")])
async def test_a_prompt_keeps_its_last_tokens(tmp_path: Path, kept: int, expected: str) -> None:
    async with running(tmp_path, says("x")) as rig:
        status, answer = await rig.complete("abcdefgh", truncate_prompt_tokens=kept, echo=True, max_tokens=1)
        assert (status, answer["choices"][0]["text"]) == (200, f"{expected}x")
        assert answer["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_may_be_cut_to_what_the_answer_leaves(tmp_path: Path, path: str) -> None:
    text = "a" * (MAX_MODEL_LEN + 50)
    async with running(tmp_path, says("x")) as rig:
        fields = {"truncate_prompt_tokens": -1, "max_tokens": 100}
        status, _ = await (rig.chat if path == CHAT else rig.complete)(text, **fields)
        assert status == 200
        assert len(rig.engine.added[0].prompt_token_ids) == MAX_MODEL_LEN - 100
        status, answer = await (rig.chat if path == CHAT else rig.complete)(
            text, truncate_prompt_tokens=-1, max_tokens=MAX_MODEL_LEN + 1
        )
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("content", ["OK!\n", "  OK ", "", "<|im_end|>", "\ud7ff\n\n", "OK"])
async def test_b35_a_continued_message_ends_the_prompt_exactly(tmp_path: Path, content: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    async with running(tmp_path, says("more")) as rig:
        for extra in ({}, {"add_generation_prompt": False}):
            prompt = await prompt_of(rig, messages=messages, continue_final_message=True, **extra)
            assert prompt == START + content
        status, answer = await rig.post(
            CHAT, {"model": MODEL, "messages": messages, "continue_final_message": True, "max_tokens": 4}
        )
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "more")


async def test_b35_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Hi"}
    assistant = {"role": "assistant", "content": "OK"}
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    async with running(tmp_path, says("x")) as rig:
        for messages, extra in (
            ([user, assistant], {"add_generation_prompt": True}),
            ([assistant, user], {}),
            ([user, {**assistant, "tool_calls": [call]}], {}),
        ):
            body = {"model": MODEL, "messages": messages, "continue_final_message": True, **extra}
            status, answer = await rig.post(CHAT, body)
            assert (status, answer["error"]["param"]) == (400, "continue_final_message")
        assert rig.engine.added == []


async def test_a_prompt_without_the_beginning_of_an_answer(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        prompt = await prompt_of(rig, messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n"


OPTIONS_TEMPLATE = "{{ messages[0].content }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ date_string }}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "low"}, "Hi||low|"),
        ({"chat_template_kwargs": {"enable_thinking": False, "date_string": "today"}}, "Hi|False||today"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}, "Hi||high|"),
    ],
)
async def test_options_reach_the_template(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    config = make_config(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"chat_template": "' + OPTIONS_TEMPLATE + '"}')
    async with running(tmp_path, says("x"), config=config) as rig:
        assert await prompt_of(rig, messages=[{"role": "user", "content": "Hi"}], **fields) == expected


async def test_b33_null_content_is_the_empty_text(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    async with running(tmp_path, says("x")) as rig:
        prompts = [
            await prompt_of(
                rig,
                messages=[
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "tool_calls": [call], **content},
                    {"role": "tool", "tool_call_id": "c1", "content": "42"},
                ],
            )
            for content in ({"content": None}, {"content": ""}, {})
        ]
    assert len({*prompts}) == 1
    assert "None" not in prompts[0]


@pytest.mark.parametrize("arguments", ["{", "[]", "5", '"x"', "{'a': 1}"])
async def test_arguments_of_earlier_calls_must_be_objects(tmp_path: Path, arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    async with running(tmp_path, says("x")) as rig:
        status, answer = await rig.post(CHAT, {"model": MODEL, "messages": messages})
        assert status == 400
        assert answer["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_special_tokens_are_shown_when_asked_for(tmp_path: Path) -> None:
    script = says("ab")
    async with running(tmp_path, script) as rig:
        prompt = [*ids_of("p"), EOS_ID]
        _, hidden = await rig.complete(prompt, echo=True, max_tokens=2)
        _, shown = await rig.complete(prompt, echo=True, max_tokens=2, skip_special_tokens=False)
    assert (hidden["choices"][0]["text"], shown["choices"][0]["text"]) == ("pab", "p<|im_end|>ab")
