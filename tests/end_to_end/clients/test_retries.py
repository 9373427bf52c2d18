"""What the SDKs do with our 429 and 503: they wait as long as Retry-After says, and then have an answer.

A server in the test's process, whose fake engine is full, or not ready yet, until the client was refused.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from fake_engine import Script
from http_rig import MODEL, Rig, running, says

from octavo.api_server.errors import RETRY_AFTER_S
from octavo.protocol.config import SchedulerConfig
from octavo.protocol.engine_messages import AddRequest

MAX_NUM_SEQS = 1
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
SDKS = ["openai", "anthropic"]


class Refusals:
    """An SDK's calls as they went over the wire: their statuses and times."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.times_s: list[float] = []

    async def note(self, response: Any) -> None:
        self.statuses.append(response.status_code)
        self.times_s.append(time.monotonic())

    async def ask(self, sdk: str, rig: Rig) -> str:
        """Ask once, as a user of the SDK does; return the text."""
        hooks = {"response": [self.note]}
        if sdk == "openai":
            http = openai.DefaultAsyncHttpxClient(event_hooks=hooks)
            async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", http_client=http) as client:
                chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
                return chat.choices[0].message.content or ""
        http_client = anthropic.DefaultAsyncHttpxClient(event_hooks=hooks)
        async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", http_client=http_client) as claude:
            message = await claude.messages.create(model=MODEL, messages=MESSAGES, max_tokens=2)
            return "".join(block.text for block in message.content if block.type == "text")


def first_one_never_ends(request: AddRequest) -> Script:
    is_occupant = request.sampling_params.max_tokens > 100
    return Script([], finish_reason=None) if is_occupant else says("Hi")(request)


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_full_server_is_asked_again(tmp_path: Path, sdk: str) -> None:
    options = {"scheduler": SchedulerConfig(max_num_seqs=MAX_NUM_SEQS), "max_queued_requests": 1}
    async with running(tmp_path, first_one_never_ends, **options) as rig:
        occupants = [asyncio.create_task(rig.complete(max_tokens=200)) for _ in range(MAX_NUM_SEQS + 1)]
        await rig.until(lambda: rig.server.admission.num_live_requests == len(occupants))
        refusals = Refusals()
        asking = asyncio.create_task(refusals.ask(sdk, rig))
        await rig.until(lambda: bool(refusals.statuses))
        for occupant in occupants:
            occupant.cancel()
        assert await asking == "Hi"
    check_patience(refusals, 429)


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_server_that_starts_is_asked_again(tmp_path: Path, sdk: str) -> None:
    async with running(tmp_path, says("Hi"), is_ready=False) as rig:
        refusals = Refusals()
        asking = asyncio.create_task(refusals.ask(sdk, rig))
        await rig.until(lambda: bool(refusals.statuses))
        rig.engine.become_ready()
        assert await asking == "Hi"
    check_patience(refusals, 503)


def check_patience(refusals: Refusals, status: int) -> None:
    assert refusals.statuses == [status, 200]
    first, second = refusals.times_s
    assert second - first >= RETRY_AFTER_S, "by itself the SDK would be back within half a second"
