"""`octavo serve --engine replay` through real processes: all are the real ones but the worker, which plays a script."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from http_rig import VOCAB_SIZE, write_tokenizer
from server_process import OCTAVO, ServerProcess

from octavo.protocol.lifecycle import ExitCode

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
TOOL_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🌧"}}\n</tool_call>'
LINES: tuple[dict[str, Any], ...] = (
    {"prompt_contains": "<|im_start|>user\nweather", "text": TOOL_CALL},
    {"prompt_contains": "two", "texts": ["first of two", "second"]},
    {"prompt_contains": "slow", "text": "one two three four five", "interval_ms": 30},
    {"prompt_contains": "endless", "text": " again", "ends": False},
)


def write_script(directory: Path, *lines: str) -> str:
    path = directory / "script.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = write_script(tmp_path_factory.mktemp("replay"), *map(json.dumps, LINES))
    with ServerProcess(script, "--engine", "replay") as server:
        yield server


async def post(server: ServerProcess, path: str, **body: Any) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/{path}", json={"model": MODEL, **body}) as answer,
    ):
        return answer.status, await answer.text()


async def chat(server: ServerProcess, text: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices."""
    messages = [{"role": "user", "content": text}]
    status, body = await post(server, "chat/completions", messages=messages, **fields)
    assert status == 200, body
    choices: list[dict[str, Any]] = json.loads(body)["choices"]
    return choices


def streamed_text(body: str) -> str:
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


async def test_the_script_answers_chat_through_the_template(server: ServerProcess) -> None:
    (choice,) = await chat(server, "weather in Zürich")
    assert (choice["message"]["content"], choice["finish_reason"]) == (TOOL_CALL, "stop")


async def test_choices_have_texts_of_their_own(server: ServerProcess) -> None:
    choices = await chat(server, "two", n=3)
    assert [each["message"]["content"] for each in choices] == ["first of two", "second", "first of two"]


async def test_many_streams_at_once_each_get_their_answer(server: ServerProcess) -> None:
    prompts = ["weather", "two", "endless"] * 20
    asked = [f"<|im_start|>user\n{prompt} {index}" for index, prompt in enumerate(prompts)]
    answers = await asyncio.gather(
        *(post(server, "completions", prompt=prompt, stream=True, max_tokens=40) for prompt in asked)
    )
    expected = {"weather": TOOL_CALL, "two": "first of two", "endless": " again" * 40}
    for prompt, (status, body) in zip(prompts, answers, strict=True):
        assert status == 200
        assert streamed_text(body) == expected[prompt]


async def test_the_interval_is_the_pace_of_the_tokens(server: ServerProcess) -> None:
    started_s = time.monotonic()
    status, body = await post(server, "completions", prompt="slow", stream=True)
    assert (status, streamed_text(body)) == (200, "one two three four five")
    assert time.monotonic() - started_s >= 5 * 0.03, "five tokens and EOS have five intervals between them"


async def test_a_prompt_without_a_line_fails_alone(server: ServerProcess) -> None:
    bad, good = await asyncio.gather(
        post(server, "completions", prompt="nothing fits"), post(server, "completions", prompt="two")
    )
    assert (bad[0], json.loads(bad[1])["error"]["code"]) == (500, "internal_error")
    assert (good[0], json.loads(good[1])["choices"][0]["text"]) == (200, "first of two")
    assert "nothing fits" not in server.stderr
    assert "no line of the script is for request" in server.stderr


def test_no_process_has_loaded_torch(server: ServerProcess) -> None:
    for process in server.living():
        assert not any("/torch/" in each.path for each in process.memory_maps())


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [OCTAVO, "serve", *arguments, "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_two_workers_play_as_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, '{"text": "together"}')
    flags = ("--engine", "replay", "--tensor-parallel-size", "2", "--served-model-name", MODEL)
    with ServerProcess(script, *flags) as server:
        status, body = asyncio.run(post(server, "completions", prompt="x"))
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "together")


def test_another_model_lends_its_words_and_needs_no_weights(tmp_path: Path) -> None:
    model = Path(write_tokenizer(tmp_path))
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}))
    (model / "model.safetensors").touch()
    script = write_script(tmp_path, json.dumps({"prompt_contains": "<|im_start|>user\nHi<|im_end|>", "text": "ähm 日"}))
    flags = ("--engine", "replay", "--replay-model", str(model), "--served-model-name", MODEL)
    with ServerProcess(script, *flags) as server:
        (choice,) = asyncio.run(chat(server, "Hi"))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ähm 日", "stop")


def test_the_replay_model_is_looked_for(tmp_path: Path) -> None:
    result = serve(write_script(tmp_path, '{"text": "a"}'), "--engine", "replay", "--replay-model", "/nowhere")
    assert result.returncode == ExitCode.MODEL_NOT_FOUND
    assert "/nowhere: no such file or directory" in result.stderr


def test_a_wrong_line_ends_the_start_with_its_number(tmp_path: Path) -> None:
    script = write_script(tmp_path, '{"text": "a"}', '{"text": "b", "temperature": 1}')
    result = serve(script, "--engine", "replay")
    assert result.returncode == ExitCode.USAGE
    assert f"octavo: error: {script}, line 2: Object contains unknown field `temperature`\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("/nowhere.jsonl", "--engine", "replay"), "argument MODEL: with --engine replay it must be a script"),
        ((MODEL, "--replay-model", MODEL), "argument --replay-model: needs --engine replay"),
        ((MODEL, "--engine", "oracle"), "argument --engine: invalid choice"),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_flag(arguments: tuple[str, ...], named: str) -> None:
    result = serve(*arguments)
    assert result.returncode == ExitCode.USAGE
    assert result.stderr.startswith(f"octavo: error: {named}")
    assert result.stderr.count("\n") == 1
