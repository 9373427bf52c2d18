"""POST /tokenize and /detokenize: the tokens that generation would compute, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_rig import CHAT_TEMPLATE, EOS_ID, MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Rig, running, says

from octavo.api_server.generation.job import Conversation
from octavo.api_server.openai.tokenize import TokenizeRequest, draft_of

USER = {"role": "user", "content": "Hi"}


async def tokenize(rig: Rig, **body: Any) -> tuple[int, Any]:
    return await rig.post("/tokenize", body)


async def test_a_text_becomes_its_tokens_and_is_itself_again(tmp_path: Path) -> None:
    text = "Größe 日本 😀<|im_end|>"
    async with running(tmp_path, says("x")) as rig:
        status, answer = await tokenize(rig, prompt=text, model=MODEL)
        tokens = rig.tokenizer.encode(text)
        assert (status, answer) == (200, {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens})
        assert tokens[-1] == EOS_ID
        assert await rig.post("/detokenize", {"tokens": tokens}) == (200, {"prompt": text})
        assert rig.engine.added == []


async def test_a_conversation_has_the_tokens_that_chat_would_compute(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief"}, USER]
    async with running(tmp_path, says("x")) as rig:
        _, answer = await tokenize(rig, messages=messages)
        assert (await rig.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 1}))[
            0
        ] == 200
        assert answer["tokens"] == rig.engine.added[0].prompt_token_ids
        _, without = await tokenize(rig, messages=messages, add_generation_prompt=False)
    assert "add_generation_prompt" in CHAT_TEMPLATE
    assert answer["tokens"][: without["count"]] == without["tokens"]
    assert answer["count"] > without["count"]


def test_a_conversation_that_goes_on_does_not_begin_an_answer() -> None:
    for fields, adds, continues in (
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
    ):
        body = msgspec.convert({"messages": [USER], **fields}, TokenizeRequest)
        conversation = draft_of(body).prompts
        assert isinstance(conversation, Conversation)
        assert (conversation.adds_generation_prompt, conversation.continues_final_message) == (adds, continues)


async def test_the_text_of_each_token_is_shown_when_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        _, answer = await tokenize(rig, prompt="aé", return_token_strs=True)
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd"]


async def test_a_prompt_may_be_longer_than_the_context_and_empty(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        assert (await tokenize(rig, prompt="a" * (MAX_MODEL_LEN + 50)))[1]["count"] == MAX_MODEL_LEN + 50
        assert (await tokenize(rig, prompt=""))[1] == {"count": 0, "max_model_len": MAX_MODEL_LEN, "tokens": []}
        assert await rig.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
        long = [40] * 5000
        assert (await rig.post("/detokenize", {"tokens": long}))[1]["prompt"] == rig.tokenizer.decode(long)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "king", "content": ""}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "tools": [{}]}, 400, "tools"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"x": []}}, 400, "chat_template_kwargs"),
        (
            "/tokenize",
            {"messages": [USER], "add_generation_prompt": True, "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, path: str, body: dict[str, Any], status: int, param: str) -> None:
    async with running(tmp_path, says("x")) as rig:
        found, answer = await rig.post(path, body)
    assert found == status
    assert answer["error"]["param"].startswith(param)


async def test_places_are_given_back(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        for body in ({"prompt": "a"}, {"prompt": 5}):
            await tokenize(rig, **body)
        assert rig.server.admission.num_live_requests == 0
