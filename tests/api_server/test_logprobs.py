"""Logprobs in answers: of chats, of completions with echo, and of prompts (B14, B16, B18)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import Script, logprob_at
from http_rig import EOS_ID, MODEL, Rig, running, says

from octavo.protocol.engine_messages import AddRequest, FinishReason

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Hé😀!"
NUM_BYTES = len(TEXT.encode())


def ids_of(text: str) -> list[int]:
    return [*says(text)(None).token_ids]  # type: ignore[arg-type]


def stopped_by_eos(text: str) -> Script:
    return Script([*ids_of(text), EOS_ID], finish_reason=FinishReason.STOP, stop_token_id=EOS_ID)


async def chat_choice(rig: Rig, **fields: Any) -> Any:
    status, answer = await rig.chat(**{"max_tokens": NUM_BYTES, "logprobs": True, **fields})
    assert status == 200, answer
    return answer["choices"][0]


async def complete(rig: Rig, prompt: Any = "Hi", **fields: Any) -> Any:
    status, answer = await rig.complete(prompt, **{"max_tokens": NUM_BYTES, **fields})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}])
async def test_b14_each_token_of_a_chat_has_an_entry_with_its_bytes(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with running(tmp_path, lambda request: stopped_by_eos(TEXT)) as rig:
        choice = await chat_choice(rig, max_tokens=NUM_BYTES + 1, **fields)
        without = await rig.chat(max_tokens=NUM_BYTES + 1)
    assert choice["message"]["content"] == TEXT
    assert choice["logprobs"].keys() == {"content", "refusal"}
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == TEXT.encode()
    assert [entry["logprob"] for entry in entries] == [logprob_at(place) for place in range(NUM_BYTES)]
    assert all(entry.keys() == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert [entry["token"] for entry in entries] == ["H", *["\ufffd"] * (NUM_BYTES - 2), "!"]
    assert without[1]["choices"][0]["logprobs"] is None


async def test_b14_top_logprobs_alone_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, says(TEXT)) as rig:
        for fields in ({"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}):
            status, answer = await rig.chat(**fields)
            assert (status, answer["error"]["param"]) == (400, "top_logprobs")
        status, answer = await rig.chat(logprobs=True, top_logprobs=21)
        assert (status, answer["error"]["param"]) == (400, "top_logprobs")
        assert rig.engine.added == []


async def test_b16_alternatives_are_those_of_their_own_place(tmp_path: Path) -> None:
    async with running(tmp_path, says("abc")) as rig:
        choice = await chat_choice(rig, max_tokens=3, top_logprobs=3, temperature=0)
        assert rig.engine.added[0].sampling_params.num_logprobs == 3
    for place, entry in enumerate(choice["logprobs"]["content"]):
        top = entry["top_logprobs"]
        assert [each["token"] for each in top] == [chr(ord("a") + place + step) for step in range(3)]
        assert [each["logprob"] for each in top] == [logprob_at(place) - step for step in range(3)]
        assert (top[0]["token"], top[0]["logprob"]) == (entry["token"], entry["logprob"])
        assert top[0]["bytes"] == list(top[0]["token"].encode())


async def test_b18_a_prompt_is_scored_without_output(tmp_path: Path) -> None:
    prompt = "Answer: Yes"
    async with running(tmp_path, says("x", prompt_rows_per_output=3)) as rig:
        answer = await complete(rig, prompt, echo=True, logprobs=1, max_tokens=0)
        (request,) = rig.engine.added
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert (request.sampling_params.max_tokens, request.sampling_params.num_prompt_logprobs) == (1, 1)
    assert choice["logprobs"] == {
        "tokens": [*prompt],
        "token_logprobs": [None, *(logprob_at(place) for place in range(1, len(prompt)))],
        "top_logprobs": [None, *({char: logprob_at(i)} for i, char in enumerate(prompt) if i)],
        "text_offset": [*range(len(prompt))],
    }


async def test_b18_a_prompt_that_fills_the_context_is_scored(tmp_path: Path) -> None:
    prompt = [40] * 512
    async with running(tmp_path, says("x"), max_model_len=512) as rig:
        answer = await complete(rig, prompt, echo=True, logprobs=0, max_tokens=0)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["total_tokens"] == 512
        for body in ({"prompt": [*prompt, 40], "max_tokens": 0}, {"prompt": prompt, "max_tokens": 1}):
            status, refusal = await rig.complete(**body)
            assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
        assert (await rig.complete([*prompt, 40], max_tokens=0, truncate_prompt_tokens=-1))[0] == 200
        assert [len(request.prompt_token_ids) for request in rig.engine.added] == [512, 512]


async def test_b18_without_echo_the_text_is_empty_and_a_chat_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, lambda request: stopped_by_eos("")) as rig:
        answer = await complete(rig, max_tokens=0, logprobs=2, n=2)
        assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("", "length")] * 2
        assert answer["choices"][0]["logprobs"]["tokens"] == []
        assert answer["usage"]["completion_tokens"] == 0
        status, refusal = await rig.chat(max_tokens=0)
        assert (status, refusal["error"]["param"]) == (400, "max_tokens")


async def test_echo_with_logprobs_goes_from_prompt_to_output(tmp_path: Path) -> None:
    async with running(tmp_path, says("xy", prompt_rows_per_output=1)) as rig:
        answer = await complete(rig, "é!", echo=True, logprobs=2, max_tokens=2, n=2)
        first, second = rig.engine.added
    assert (first.sampling_params.num_prompt_logprobs, second.sampling_params.num_prompt_logprobs) == (2, -1)
    for choice in answer["choices"]:
        assert choice["text"] == "é!xy"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "x", "y"]
        assert logprobs["text_offset"] == [0, 0, 1, 2, 3]
        assert logprobs["token_logprobs"] == [None, logprob_at(1), logprob_at(2), logprob_at(0), logprob_at(1)]
        assert logprobs["top_logprobs"][3] == {"x": logprob_at(0), "y": logprob_at(0) - 1}


async def test_echo_alone_needs_no_logprobs(tmp_path: Path) -> None:
    async with running(tmp_path, says("xy")) as rig:
        answer = await complete(rig, ["ab", "c"], echo=True, max_tokens=2)
        streamed = await rig.stream(COMPLETIONS, prompt=["ab", "c"], echo=True, max_tokens=2)
        assert {request.sampling_params.num_prompt_logprobs for request in rig.engine.added} == {-1}
    assert [choice["text"] for choice in answer["choices"]] == ["abxy", "cxy"]
    texts = ["", ""]
    for event in streamed[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["abxy", "cxy"]


async def test_harnesses_find_an_entry_for_every_token_of_a_completion(tmp_path: Path) -> None:
    def script(request: AddRequest) -> Script:
        return stopped_by_eos("")

    prompt = [*ids_of("ab"), EOS_ID, *ids_of("c")]  # a special token, whose text is skipped
    async with running(tmp_path, script) as rig:
        answer = await complete(rig, prompt, echo=True, logprobs=1, max_tokens=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "<|im_end|>", "c", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3]
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + answer["usage"]["completion_tokens"]


async def test_prompt_logprobs_are_listed_by_id(tmp_path: Path) -> None:
    async with running(tmp_path, says("xy", prompt_rows_per_output=1)) as rig:
        completion = await complete(rig, ["abc", "d"], prompt_logprobs=2, max_tokens=2)
        _, chat = await rig.chat("a", prompt_logprobs=0, max_tokens=2)
        chat_prompt = rig.engine.added[-1].prompt_token_ids
    b, c = ids_of("bc")
    first = completion["choices"][0]["prompt_logprobs"]
    assert first == [
        None,
        {
            str(b): {"logprob": logprob_at(1), "rank": 1, "decoded_token": "b"},
            str(b + 1): {"logprob": logprob_at(1) - 1, "rank": 2, "decoded_token": "c"},
        },
        {
            str(c): {"logprob": logprob_at(2), "rank": 1, "decoded_token": "c"},
            str(c + 1): {"logprob": logprob_at(2) - 1, "rank": 2, "decoded_token": "d"},
        },
    ]
    assert completion["choices"][1]["prompt_logprobs"] == [None]
    assert completion["choices"][0]["logprobs"] is None
    assert [next(iter(each or {"": 0})) for each in chat["prompt_logprobs"]] == ["", *map(str, chat_prompt[1:])]
    assert chat["prompt_logprobs"][1][str(chat_prompt[1])].keys() == {"logprob", "decoded_token"}


async def test_a_prompt_may_be_scored_twice_in_different_depth(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        answer = await complete(rig, "ab", echo=True, logprobs=0, prompt_logprobs=2, max_tokens=1)
        assert rig.engine.added[0].sampling_params.num_prompt_logprobs == 2
    (choice,) = answer["choices"]
    assert [len(top or {}) for top in choice["logprobs"]["top_logprobs"]] == [0, 1, 1]
    assert len(choice["prompt_logprobs"][1]) == 2


async def test_prompt_logprobs_are_not_streamed(tmp_path: Path) -> None:
    async with running(tmp_path, says("xy")) as rig:
        status, answer = await rig.complete(prompt_logprobs=1, stream=True)
        assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_entries_behind_a_stop_string_are_not_shown(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, says("one two", tokens_per_output=4)) as rig:
        fields: dict[str, Any] = {"stop": "e t", "max_tokens": 7, "logprobs": True if path == CHAT else 0}
        _, answer = await (rig.chat if path == CHAT else rig.complete)(**fields)
        _, shown = await (rig.chat if path == CHAT else rig.complete)(**fields, include_stop_str_in_output=True)
    for each, text in ((answer, "on"), (shown, "one t")):
        choice = each["choices"][0]
        if path == CHAT:
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [*text]
        else:
            assert choice["logprobs"]["tokens"] == [*text]


async def test_tokens_are_shown_as_ids_when_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path, says("ab")) as rig:
        fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 2}
        choice = await chat_choice(rig, top_logprobs=1, **fields)
        completion = await complete(rig, logprobs=1, **fields)
    names = [f"token_id:{token_id}" for token_id in ids_of("ab")]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
    assert [entry["top_logprobs"][0]["token"] for entry in choice["logprobs"]["content"]] == names
    assert completion["choices"][0]["logprobs"]["tokens"] == names


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_token_ids_are_returned_when_asked_for(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, lambda request: stopped_by_eos("ab")) as rig:
        fields = {"return_token_ids": True, "max_tokens": 9}
        _, answer = await (rig.chat if path == CHAT else rig.complete)(**fields)
        events = await rig.stream(path, **fields)
        prompt = rig.engine.added[0].prompt_token_ids
    choice = answer["choices"][0]
    assert choice["token_ids"] == [*ids_of("ab"), EOS_ID]
    assert (answer if path == CHAT else choice)["prompt_token_ids"] == prompt
    chunks = [event["choices"][0] for event in events[:-1]]
    assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])] == choice["token_ids"]
    assert (events[0] if path == CHAT else chunks[0])["prompt_token_ids"] == prompt


async def test_too_many_logprobs_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, says("x"), max_model_len=3_000_000) as rig:
        status, answer = await rig.complete(logprobs=20, max_tokens=200_000)
        assert (status, answer["error"]["param"]) == (400, "logprobs")
        status, answer = await rig.chat(logprobs=True, top_logprobs=20)
        assert (status, answer["error"]["param"]) == (400, "top_logprobs")
        assert rig.engine.added == []


async def test_output_without_the_logprobs_of_its_prompt_is_an_error(tmp_path: Path) -> None:
    async with running(tmp_path, says("xy", prompt_rows_per_output=0), request_timeout_s=5) as rig:
        status, answer = await rig.complete(echo=True, logprobs=0)
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert rig.server.admission.num_live_requests == 0


async def test_openai_python_reads_logprobs(tmp_path: Path) -> None:
    async with running(tmp_path, lambda request: stopped_by_eos(TEXT)) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_BYTES + 1}
        chat = {**ask, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
        whole = (await client.chat.completions.create(**chat)).choices[0]
        assert whole.logprobs is not None
        async with client.chat.completions.stream(**chat) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.logprobs == whole.logprobs
        assert final.message.content == whole.message.content == TEXT
        completion = await client.completions.create(**ask, prompt="ab", echo=True, logprobs=0)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert completion.choices[0].text == f"ab{TEXT}"
        assert logprobs.tokens is not None
        assert len(logprobs.tokens) == 2 + NUM_BYTES + 1
        await client.close()
