"""Answers and streams of both endpoints, over real sockets."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import Script
from http_rig import EOS_ID, MAX_MODEL_LEN, MODEL, Rig, running, says

from octavo.protocol.engine_messages import AddRequest, FinishReason

PATHS = ("/v1/chat/completions", "/v1/completions")
CHAT, COMPLETIONS = PATHS


async def ask(rig: Rig, path: str, **fields: Any) -> Any:
    status, answer = await (rig.chat(**fields) if path == CHAT else rig.complete(**fields))
    assert status == 200, answer
    return answer


def text_of(choice: Any) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def chunks_of(events: list[Any], index: int) -> list[Any]:
    return [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]


def streamed_text(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in chunks_of(events, index)
    )


async def test_chat_answer_has_exactly_the_fields_of_the_schema(tmp_path: Path) -> None:
    async with running(tmp_path, says("Hello!", num_cached_tokens=3)) as rig:
        answer = await ask(rig, CHAT, max_tokens=6)
        prompt = rig.engine.added[0].prompt_token_ids
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 6,
            "total_tokens": len(prompt) + 6,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_completion_answer_has_exactly_the_fields_of_the_schema(tmp_path: Path) -> None:
    async with running(tmp_path, says("Hello!")) as rig:
        answer = await ask(rig, COMPLETIONS, max_tokens=6)
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
@pytest.mark.parametrize("stop", ["ghijkl", "\n\n", ["zzz", "h"], "héé", "never"])
async def test_b01_stream_equals_whole_answer_and_stop_strings_never_leak(
    tmp_path: Path, path: str, tokens_per_output: int, stop: str | list[str]
) -> None:
    text = "abcdefg ghijkm ghijkl héé\n\nrest"
    strings = [stop] if isinstance(stop, str) else stop
    cut = min((text.find(each) for each in strings if each in text), default=len(text))
    async with running(tmp_path, says(text, tokens_per_output=tokens_per_output)) as rig:
        answer = await ask(rig, path, max_tokens=100, stop=stop)
        events = await rig.stream(path, max_tokens=100, stop=stop, stream_options={"include_usage": True})
    choice = answer["choices"][0]
    assert text_of(choice) == text[:cut] == streamed_text(events)
    last = chunks_of(events, 0)[-1]
    assert choice["finish_reason"] == last["finish_reason"] == ("length" if cut == len(text) else "stop")
    assert choice.get("stop_reason") == last.get("stop_reason")
    assert (choice.get("stop_reason") in strings) == (cut < len(text))
    assert answer["usage"] == events[-2]["usage"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_stop_string_aborts_in_the_engine(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, says("stop here" + "x" * 400, interval_s=0.001)) as rig:
        await ask(rig, path, max_tokens=400, stop=" here")
        await rig.until(lambda: rig.engine.aborted == [rig.engine.added[0].request_id])
        assert await rig.metric('octavo_finished_requests_total{reason="stop"}') == 1


@pytest.mark.parametrize("path", PATHS)
async def test_the_stop_string_is_shown_when_asked_for(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, says("one two three")) as rig:
        answer = await ask(rig, path, max_tokens=13, stop=" two", include_stop_str_in_output=True)
    assert text_of(answer["choices"][0]) == "one two"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("reason", "expected"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
async def test_b03_every_choice_ends_with_one_finish_reason_and_the_stream_with_done(
    tmp_path: Path, path: str, n: int, reason: FinishReason, expected: str
) -> None:
    def script(request: AddRequest) -> Script:
        return Script([40, 41, EOS_ID], finish_reason=reason, stop_token_id=EOS_ID)

    async with running(tmp_path, script) as rig:
        events = await rig.stream(path, max_tokens=3, n=n)
    assert events[-1] == "[DONE]"
    for index in range(n):
        reasons = [choice["finish_reason"] for choice in chunks_of(events, index)]
        assert reasons[-1] == expected
        assert set(reasons[:-1]) == {None}


async def test_the_first_delta_of_each_choice_has_the_role(tmp_path: Path) -> None:
    async with running(tmp_path, says("ab")) as rig:
        events = await rig.stream(CHAT, max_tokens=2, n=2)
    for index in range(2):
        first, *others = chunks_of(events, index)
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in others)
        assert others[-1]["delta"] == {}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
async def test_b07_usage_comes_last_with_empty_choices_and_is_null_before(tmp_path: Path, path: str, n: int) -> None:
    async with running(tmp_path, says("four")) as rig:
        events = await rig.stream(path, max_tokens=4, n=n, stream_options={"include_usage": True})
        answer = await ask(rig, path, max_tokens=4, n=n)
        without = await rig.stream(path, max_tokens=4, n=n)
    *chunks, usage_chunk, done = events
    assert done == "[DONE]"
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"] == answer["usage"]
    assert usage_chunk["usage"]["completion_tokens"] == 4 * n
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert all("usage" not in chunk for chunk in without[:-1])
    assert len({chunk["id"] for chunk in events[:-1]}) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_continuous_usage_is_on_every_chunk(tmp_path: Path, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running(tmp_path, says("four", interval_s=0.01)) as rig:
        events = await rig.stream(path, max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert streamed_text(events) == "four"


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("prompt", "num_prompt_tokens"),
    [("abc", [3]), (["a", "bcd"], [1, 3]), ([1, 2, 3], [3]), ([[1, 2], [3]], [2, 1])],
    ids=str,
)
async def test_prompts_of_all_forms_with_n(
    tmp_path: Path, is_streamed: bool, prompt: Any, num_prompt_tokens: list[int]
) -> None:
    def script(request: AddRequest) -> Script:
        return Script([30 + 10 * len(request.prompt_token_ids) + request.sampling_params.choice_index] * 2)

    async with running(tmp_path, script) as rig:
        num_choices = 2 * len(num_prompt_tokens)
        expected = [chr(33 + 30 + 10 * p + j) * 2 for p in num_prompt_tokens for j in range(2)]
        if is_streamed:
            events = await rig.stream(
                COMPLETIONS, prompt=prompt, n=2, max_tokens=2, stream_options={"include_usage": True}
            )
            texts = [streamed_text(events, index) for index in range(num_choices)]
            usage = events[-2]["usage"]
        else:
            answer = await ask(rig, COMPLETIONS, prompt=prompt, n=2, max_tokens=2)
            assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
            texts = [choice["text"] for choice in answer["choices"]]
            usage = answer["usage"]
        assert texts == expected
        assert usage["prompt_tokens"] == sum(num_prompt_tokens)
        assert usage["completion_tokens"] == 2 * num_choices
        seeds = {request.sampling_params.seed for request in rig.engine.added}
        assert len(seeds) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_sampling_fields_reach_the_engine(tmp_path: Path, path: str) -> None:
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "stop_token_ids": [5],
        "ignore_eos": True,
    }
    async with running(tmp_path, says("x" * 9)) as rig:
        await ask(rig, path, **fields)
        params = rig.engine.added[0].sampling_params
    assert {name: getattr(params, name) for name in fields} == {**fields, "stop_token_ids": (5,)}


async def test_defaults_are_openais(tmp_path: Path) -> None:
    async with running(tmp_path, says("x" * 600)) as rig:
        await ask(rig, CHAT, temperature=None, max_tokens=None, stop=None, top_k=-1, seed=-1, user="u", unknown=1)
        await ask(rig, COMPLETIONS)
        chat, completion = rig.engine.added
    assert chat.sampling_params.max_tokens == MAX_MODEL_LEN - len(chat.prompt_token_ids)
    assert completion.sampling_params.max_tokens == 16
    assert (chat.sampling_params.temperature, chat.sampling_params.top_p, chat.sampling_params.top_k) == (1, 1, 0)
    assert chat.sampling_params.seed != completion.sampling_params.seed


async def test_max_completion_tokens_is_the_same_as_max_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, says("abcdef")) as rig:
        answer = await ask(rig, CHAT, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


async def test_messages_of_all_roles_and_forms_render(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant"},
    ]
    async with running(tmp_path, says("x")) as rig:
        status, _ = await rig.post(CHAT, {"model": MODEL, "messages": messages, "max_tokens": 1})
        text = rig.tokenizer.decode(rig.engine.added[0].prompt_token_ids, skip_special_tokens=False)
    assert status == 200
    called = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'  # the template knows no calls
    told = "<tool_response>\n42\n</tool_response>"
    turns = [("system", "S"), ("user", "a\nb"), ("assistant", called), ("user", told), ("assistant", "")]
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert text == f"{rendered}<|im_start|>assistant\n"


async def test_b22_like_many_at_once_get_each_their_own(tmp_path: Path) -> None:
    def script(request: AddRequest) -> Script:
        return Script([*request.prompt_token_ids[::-1]] * 3, tokens_per_output=2)

    async with running(tmp_path, script) as rig:
        prompts = [f"prompt number {number} " for number in range(64)]
        events = await asyncio.gather(*(rig.stream(COMPLETIONS, prompt=p, max_tokens=90) for p in prompts))
        for prompt, each in zip(prompts, events, strict=True):
            assert streamed_text(each) == prompt[::-1] * 3
        await rig.until(lambda: rig.server.metrics.stats.num_running_requests == 0)
        assert rig.server.admission.num_live_requests == 0


async def test_repeated_output_is_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, says("abcdefgh", tokens_per_output=2, repeats=3)) as rig:
        answer = await ask(rig, COMPLETIONS, max_tokens=8)
        assert answer["choices"][0]["text"] == "abcdefgh"
        assert await rig.metric("octavo_generation_tokens_total") == 8


async def test_openai_python_in_a_thread(tmp_path: Path) -> None:
    async with running(tmp_path, says("Hello!.", finish_reason=FinishReason.STOP)) as rig:
        client = openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)

        def use() -> None:
            messages = [{"role": "user", "content": "Hi"}]
            whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=7)
            assert whole.choices[0].message.content == "Hello!"
            chunks = list(
                client.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=7, stream=True, stream_options={"include_usage": True}
                )
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "Hello!"
            assert chunks[-1].usage == whole.usage
            assert next(model.id for model in client.models.list()) == MODEL
            with client.chat.completions.stream(model=MODEL, messages=messages, max_tokens=7) as stream:
                assert stream.get_final_completion().choices[0].message.content == "Hello!"
            with pytest.raises(openai.NotFoundError) as problem:
                client.completions.create(model="nope", prompt="x")
            assert problem.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as problem:
                client.completions.create(model=MODEL, prompt="x" * MAX_MODEL_LEN)
            assert problem.value.code == "context_length_exceeded"

        await asyncio.to_thread(use)


async def test_openai_python_async(tmp_path: Path) -> None:
    async with running(tmp_path, says("Hello!.", finish_reason=FinishReason.STOP)) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
        whole = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=7)
        assert whole.choices[0].text == "Hello!"
        stream = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=7, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello!"
        await client.close()
