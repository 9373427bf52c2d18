"""Streams put together again, in the form of the answers that are not streamed, and both without what may differ.

What may differ are times, and ids; those of one answer must still be as many as in the other, in the same places.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from http_rig import parse_events
from named_streams import NamedEvent, named_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ID_FIELDS = {"id", "call_id", "item_id"}
TIME_FIELDS = {"created", "created_at", "completed_at"}


class Joined(NamedTuple):
    """An answer of any route: what is said for each choice, and everything else."""

    choices: list[Any]
    rest: Any


def joined_stream(path: str, text: str) -> Joined:
    """Return what the bytes of a stream add up to."""
    if path in JOINS:
        return comparable(JOINS[path](named_events(text)))
    return comparable(_joined_chunks(parse_events(text), path))


def whole_answer(path: str, answer: Any) -> Joined:
    """Return the same for the body of an answer that is not streamed."""
    if path == RESPONSES:
        return comparable(Joined(answer["output"], {**answer, "output": None}))
    if path == MESSAGES:
        return comparable(Joined(answer["content"], {**answer, "content": None}))
    beside = {"prompt_token_ids": answer["prompt_token_ids"]} if "prompt_token_ids" in answer else {}
    choices = [_whole_choice({**beside, **choice}, path) for choice in answer["choices"]]
    return comparable(Joined(choices, answer["usage"]))


def comparable(joined: Joined) -> Joined:
    """Return `joined` with ids numbered in the order in which they appear, and without times."""
    numbers: dict[str, int] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(each) for each in value]
        if isinstance(value, dict):
            return {name: field(name, each) for name, each in value.items()}
        return value

    def field(name: str, value: Any) -> Any:
        if name in ID_FIELDS:
            return numbers.setdefault(value, len(numbers))
        return value is None if name in TIME_FIELDS else walk(value)

    return Joined(walk(joined.choices), walk(joined.rest))


def _joined_chunks(events: list[Any], path: str) -> Joined:
    *chunks, usage_chunk, done = events
    assert done == "[DONE]"
    found: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        so_far = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "reasoning": "", "calls": []})
        assert "finish_reason" not in so_far, "something came after the end"
        _add_chunk(so_far, choice, path)
        _add_prompt_ids(so_far, chunk, choice)
    for so_far in found.values():
        assert [call.pop("index") for call in so_far["calls"]] == [*range(len(so_far["calls"]))]
    return Joined([_without_empty_logprobs(found[index]) for index in sorted(found)], usage_chunk["usage"])


def _add_chunk(so_far: dict[str, Any], choice: Any, path: str) -> None:
    delta = choice.get("delta", {})
    so_far["text"] += delta.get("content", "") if path == CHAT else choice["text"]
    so_far["reasoning"] += delta.get("reasoning_content", "")
    assert delta.get("reasoning") == delta.get("reasoning_content")
    so_far["calls"] += delta.get("tool_calls", ())
    _add_logprobs(so_far, choice)
    if "token_ids" in choice:
        so_far.setdefault("token_ids", []).extend(choice["token_ids"])
    if choice["finish_reason"] is not None:
        so_far |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}


def _add_prompt_ids(so_far: dict[str, Any], *places: Any) -> None:
    """The first chunk of a choice has the ids of its prompt: a chat's beside the choice, a completion's in it."""
    for place in places:
        if "prompt_token_ids" in place:
            assert "prompt_token_ids" not in so_far
            so_far["prompt_token_ids"] = place["prompt_token_ids"]


def _add_logprobs(total: dict[str, Any], choice: Any) -> None:
    for name, entries in (choice.get("logprobs") or {}).items():
        if entries is not None:
            total.setdefault("logprobs", {}).setdefault(name, []).extend(entries)


def _whole_choice(choice: Any, path: str) -> Any:
    message = choice.get("message", {})
    result = {
        "index": choice["index"],
        "text": (message["content"] or "") if path == CHAT else choice["text"],
        "reasoning": message.get("reasoning_content", ""),
        "calls": message.get("tool_calls", []),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
    }
    _add_logprobs(result, choice)
    result |= {name: choice[name] for name in ("token_ids", "prompt_token_ids") if name in choice}
    return _without_empty_logprobs(result)


def _without_empty_logprobs(choice: Any) -> Any:
    """A stream without any text has no chunk that could say that there are no logprobs."""
    return {name: value for name, value in choice.items() if name != "logprobs" or any(value.values())}


def _joined_response(events: list[NamedEvent]) -> Joined:
    """The deltas must add up to the items that the last event has."""
    items: list[Any] = []
    for name, event in events:
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = items[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", ()))
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert items[event["output_index"]] == event["item"]
    response = events[-1][1]["response"]
    assert items == response["output"]
    return Joined(items, {**response, "output": None})


def _joined_message(events: list[NamedEvent]) -> Joined:
    message, blocks = events[0][1]["message"], []
    for name, event in events:
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif name == "content_block_delta":
            kind, text = event["delta"].values()
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
            blocks[event["index"]][field] += text
        elif name == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return Joined(blocks, {**message, "content": None})


JOINS: dict[str, Callable[[list[NamedEvent]], Joined]] = {RESPONSES: _joined_response, MESSAGES: _joined_message}
