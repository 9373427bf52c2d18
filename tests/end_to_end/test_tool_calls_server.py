"""Recorded outputs of canitoolcall's models through a real server: the replay engine says them, clients get the calls.

Skipped where canitoolcall is not installed. The prompt ends with what the model's own template ends with, as the last
message that is to be continued.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_process import ServerProcess

pytest.importorskip("canitoolcall")
pytest.importorskip("jsonschema")

from canitoolcall.adapters.base import ReplayInput
from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status
from canitoolcall_adapter import FAMILIES, family_of

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
GOOD = {Status.PASS, Status.SOFT_PASS}
NUM_AT_ONCE = 8


def replay_input(fixture: Fixture) -> ReplayInput:
    return ReplayInput.from_fixture(fixture, load_families()[fixture.family])


def cases() -> dict[str, list[Fixture]]:
    """Fixtures by the name of our family."""
    result: dict[str, list[Fixture]] = {}
    for fixture in load_fixtures():
        if fixture.family in FAMILIES:
            result.setdefault(family_of(replay_input(fixture)), []).append(fixture)
    return result


CASES = cases()


def key_of(fixture: Fixture) -> str:
    """Text by which the script knows the prompt."""
    return f"fixture <{fixture.id}>"


def write_script(path: Path, fixtures: list[Fixture]) -> str:
    lines = [{"prompt_contains": key_of(each), "text": each.raw_output} for each in fixtures]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


class Client:
    """Asks for one fixture's answer, whole and streamed."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.turn = asyncio.Semaphore(NUM_AT_ONCE)

    async def observe(self, fixture: Fixture) -> Observation:
        async with self.turn:
            body = await self.body_of(fixture)
            return Observation(nonstream=await self.whole(body), streams={"one": await self.stream(body)})

    async def body_of(self, fixture: Fixture) -> dict[str, Any]:
        raw = replay_input(fixture)
        messages = [{"role": "user", "content": key_of(fixture)}]
        if raw.generation_prompt:
            messages.append({"role": "assistant", "content": raw.generation_prompt})
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [*fixture.tools]}
        if raw.generation_prompt:
            body["continue_final_message"] = True
        if raw.truncated:
            body["max_tokens"] = await self.num_tokens(raw.text)
        return body

    async def num_tokens(self, text: str) -> int:
        body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
        async with self.session.post("/tokenize", json=body) as answer:
            return int((await answer.json())["count"])

    async def whole(self, body: dict[str, Any]) -> ParseResult:
        async with self.session.post("/v1/chat/completions", json=body) as answer:
            text = await answer.text()
        if answer.status != 200:
            return ParseResult(exception=f"HTTP {answer.status}: {text}")
        message = json.loads(text)["choices"][0]["message"]
        calls = [each["function"] for each in message.get("tool_calls", ())]
        return ParseResult(
            message["content"] or None,
            message.get("reasoning_content"),
            tuple(ParsedToolCall(call["name"], call["arguments"]) for call in calls),
        )

    async def stream(self, body: dict[str, Any]) -> ParseResult:
        """Add up the deltas as clients do: texts joined, calls by their index."""
        async with self.session.post("/v1/chat/completions", json={**body, "stream": True}) as answer:
            text = await answer.text()
        if answer.status != 200:
            return ParseResult(exception=f"HTTP {answer.status}: {text}")
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        calls: dict[int, list[str]] = {}
        for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
            name_and_arguments = calls.setdefault(call["index"], ["", ""])
            name_and_arguments[0] += call["function"].get("name", "")
            name_and_arguments[1] += call["function"].get("arguments", "")
        return ParseResult(
            "".join(delta.get("content", "") for delta in deltas) or None,
            "".join(delta.get("reasoning_content", "") for delta in deltas) or None,
            tuple(ParsedToolCall(*calls[index]) for index in sorted(calls)),
        )


async def observe_all(url: str, fixtures: list[Fixture]) -> list[Observation]:
    async with aiohttp.ClientSession(url) as session:
        client = Client(session)
        return await asyncio.gather(*map(client.observe, fixtures))


@pytest.mark.parametrize("family", sorted(CASES))
def test_recorded_outputs(family: str, tmp_path: Path) -> None:
    fixtures = CASES[family]
    script = write_script(tmp_path / "script.jsonl", fixtures)
    with ServerProcess(script, "--engine", "replay", "--tool-call-parser", family) as server:
        observations = asyncio.run(observe_all(server.url, fixtures))
    problems = []
    for fixture, observation in zip(fixtures, observations, strict=True):
        rows = run_checks(fixture, load_families()[fixture.family], observation)
        if case_status(rows) not in GOOD:
            first = next(row for row in rows if row.status not in GOOD)
            problems.append(f"{fixture.id}: {first.check} {first.strategy}: {first.detail}")
    assert not problems
