"""Anthropic's Python client against the embedded model."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from embedded_model import EMBEDDED_MODEL

pytestmark = pytest.mark.model

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story."}]
GREEDY: dict[str, Any] = {"model": EMBEDDED_MODEL, "extra_body": {"temperature": 0}}  # new SDKs have no such argument


def num_input_tokens(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_messages(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(messages=CAPITAL, max_tokens=40, system="You are helpful.", **GREEDY)
    assert "Paris" in text_of(message)
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", EMBEDDED_MODEL)
    assert message.usage.output_tokens > 0


def test_a_stream_adds_up_to_the_whole_message(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=STORY, max_tokens=12, **GREEDY)
    with claude.messages.stream(messages=STORY, max_tokens=12, **GREEDY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == text_of(final) == text_of(whole)
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    assert num_input_tokens(final.usage) == num_input_tokens(whole.usage)


def test_what_is_counted_is_what_is_computed(claude: anthropic.Anthropic) -> None:
    for options in ({}, {"system": "Be brief."}):
        count = claude.messages.count_tokens(model=EMBEDDED_MODEL, messages=CAPITAL, **options)
        usage = claude.messages.create(messages=CAPITAL, max_tokens=1, **options, **GREEDY).usage
        assert count.input_tokens == num_input_tokens(usage), options


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(messages=CAPITAL, max_tokens=40, stop_sequences=["Paris"], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in text_of(message)


def test_errors_are_of_their_type_and_name_the_field(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nope", messages=CAPITAL, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError) as bad:
        claude.messages.create(messages=CAPITAL, max_tokens=0, **GREEDY)
    error: Any = bad.value.body
    assert (error["type"], error["error"]["param"]) == ("error", "max_tokens")
