"""Sends requests to an OpenAI-compatible server, times their streams, and checks that each gave what was asked.

An answer counts only when the server said how many tokens it holds (usage), that they are as many as asked, and that
the stream is whole ([DONE]). Counting chunks instead was rejected: a chunk may hold any number of tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from octavo.api_server.client.stream_events import DONE, MAX_LINE_BYTES, Event, Usage, data_of, decode_event, error_text
from octavo.api_server.client.workloads import Request

MAX_ERROR_CHARS = 300
LengthControl = Literal["ignore_eos", "min_tokens", "no_end_token", "none"]


@dataclass(frozen=True)
class Target:
    """A server and how to ask it.

    `length_control` says how lengths are forced: by a field of the request, by a model that has no end token, or not at
    all. `ends_with_done` False is for servers whose streams are whole with usage and finish reason, without [DONE].
    """

    url: str
    model: str
    label: str
    pid: int | None = None
    is_chat: bool = False
    length_control: LengthControl = "ignore_eos"
    timeout_s: float = 600.0
    ends_with_done: bool = True
    api_key: str | None = field(default=None, repr=False)


@dataclass
class Outcome:
    """What came back for one request. Times are seconds since it was sent.

    `error` says why it does not count: its kind, a colon, and what is special about this one. Thoughts are text too.
    """

    num_asked_tokens: int
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    ttft_s: float | None = None
    end_to_end_s: float = 0.0
    chunk_gaps_s: list[float] = field(default_factory=list)
    error: str | None = None
    wrong_length: str | None = None

    @property
    def is_good(self) -> bool:
        return self.error is None and self.wrong_length is None

    @property
    def error_kind(self) -> str | None:
        return None if self.error is None else self.error.partition(":")[0]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first (None where there is no second)."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_to_end_s - self.ttft_s) / (self.num_output_tokens - 1)


class BadAnswerError(Exception):
    """The server answered, but not with a whole stream of the API. The text begins with the kind and a colon."""


def new_session(target: Target) -> aiohttp.ClientSession:
    """One connection a request: some servers close theirs after a stream, which must not count as an error."""
    return aiohttp.ClientSession(
        headers={} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"},
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        read_bufsize=MAX_LINE_BYTES,
    )


def body_of(target: Target, request: Request) -> dict[str, Any]:
    """Return the JSON body: greedy, streamed, of a forced length."""
    is_text = isinstance(request.prompt, str)
    messages = [{"role": "user", "content": request.prompt}] if is_text else request.prompt
    lengths: dict[LengthControl, dict[str, Any]] = {
        "ignore_eos": {"ignore_eos": True},
        "min_tokens": {"min_tokens": request.num_output_tokens},
        "no_end_token": {},
        "none": {},
    }
    return {
        "model": target.model,
        **({"messages": messages} if target.is_chat else {"prompt": request.prompt}),
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **lengths[target.length_control],
    }


async def complete(session: aiohttp.ClientSession, target: Target, request: Request) -> Outcome:
    """Send one request and read its stream. Never raises for what a server does: `error` says it."""
    outcome = Outcome(request.num_output_tokens)
    path = "/v1/chat/completions" if target.is_chat else "/v1/completions"
    started_s = time.perf_counter()
    try:
        async with session.post(target.url + path, json=body_of(target, request)) as response:
            if response.status != 200:
                raise BadAnswerError(f"HTTP {response.status}: {(await response.text())[:MAX_ERROR_CHARS]}")
            await _read_stream(response.content, outcome, started_s, target.ends_with_done)
    except BadAnswerError as problem:
        outcome.error = str(problem)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as problem:
        outcome.error = f"{type(problem).__name__}: {problem}"
    outcome.end_to_end_s = time.perf_counter() - started_s
    if outcome.error is None:
        outcome.wrong_length = _wrong_length(outcome, target.length_control)
    return outcome


async def _read_stream(lines: aiohttp.StreamReader, outcome: Outcome, started_s: float, ends_with_done: bool) -> None:
    previous_s, pieces = started_s, []
    usage: Usage | None = None
    async for line in lines:
        data = data_of(line)
        if data is None:
            continue
        now_s = time.perf_counter()
        if data == DONE:
            break
        event = decode_event(data)
        if event.error:
            raise BadAnswerError(f"error in the stream: {error_text(event.error)[:MAX_ERROR_CHARS]}")
        usage = event.usage or usage
        if text := _take(event, outcome):
            pieces.append(text)
            if outcome.ttft_s is None:
                outcome.ttft_s = now_s - started_s
            else:
                outcome.chunk_gaps_s.append(now_s - previous_s)
            previous_s = now_s
    else:
        if ends_with_done:
            raise BadAnswerError("not a whole stream: it ended without [DONE]")
    if usage is None or outcome.finish_reason is None:
        raise BadAnswerError("not a whole stream: it has no usage or no finish_reason")
    outcome.text = "".join(pieces)
    outcome.num_prompt_tokens, outcome.num_output_tokens = usage.prompt_tokens, usage.completion_tokens


def _take(event: Event, outcome: Outcome) -> str:
    """Return the event's text and note its finish reason; we ask for one choice."""
    for choice in event.choices:
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        return choice.thought + choice.content
    return ""


def _wrong_length(outcome: Outcome, length_control: LengthControl) -> str | None:
    is_forced = length_control != "none"
    asked, got = outcome.num_asked_tokens, outcome.num_output_tokens
    if got > asked or (is_forced and got < asked):
        return f"asked for {asked} tokens, got {got} (finish_reason {outcome.finish_reason})"
    return None


Send = Callable[[Request], Awaitable[Outcome]]


async def run_closed_loop(send: Send, requests: Sequence[Request], concurrency: int) -> list[Outcome]:
    """Keep `concurrency` requests in flight until all are done; return outcomes in the order of the requests."""
    waiting, outcomes = iter(enumerate(requests)), {}

    async def worker() -> None:
        for index, request in waiting:
            outcomes[index] = await send(request)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return [outcomes[index] for index in range(len(requests))]


async def run_open_loop(send: Send, requests: Sequence[Request]) -> list[Outcome]:
    """Send each request at its `arrival_s` after now, whatever the server does; outcomes in the requests' order."""
    started_s = time.perf_counter()

    async def at_arrival(request: Request) -> Outcome:
        await asyncio.sleep(started_s + request.arrival_s - time.perf_counter())
        return await send(request)

    return await asyncio.gather(*map(at_arrival, requests))
